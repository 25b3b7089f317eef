# SPDX-License-Identifier: Apache-2.0
"""`digen bench`: the same work under several placements and techniques, run for real and compared."""
