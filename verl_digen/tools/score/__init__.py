# SPDX-License-Identifier: Apache-2.0
"""Rewards outside a run: `digen score` scores files. No Ray."""
