# SPDX-License-Identifier: Apache-2.0
"""Platforms that verl lacks."""
