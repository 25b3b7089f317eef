# SPDX-License-Identifier: Apache-2.0
"""What travels through TransferQueue between generation and training, and under which keys."""
