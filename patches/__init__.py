# SPDX-License-Identifier: Apache-2.0
"""Shims for limitations upstream: one module each, with its version range and the condition under which it goes."""
