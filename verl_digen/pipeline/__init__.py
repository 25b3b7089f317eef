# SPDX-License-Identifier: Apache-2.0
"""Data that travels through TransferQueue between generation and training, and its keys."""
