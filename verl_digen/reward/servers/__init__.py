# SPDX-License-Identifier: Apache-2.0
"""Rewards that a server calculates: settings, a client with retries, and one file per protocol in `protocols/`."""
