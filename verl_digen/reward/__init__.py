# SPDX-License-Identifier: Apache-2.0
"""Scoring a sample as soon as its picture exists."""
