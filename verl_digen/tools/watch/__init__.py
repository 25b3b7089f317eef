# SPDX-License-Identifier: Apache-2.0
"""`digen watch`: pages of the runs below a folder, for a browser."""
