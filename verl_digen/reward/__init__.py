# SPDX-License-Identifier: Apache-2.0
"""Reward functions and workers; a sample is scored as soon as its pixels exist."""
