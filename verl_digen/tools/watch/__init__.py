# SPDX-License-Identifier: Apache-2.0
"""`digen watch`: pages of the runs below a folder, for a browser."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that no other machine reaches."""
