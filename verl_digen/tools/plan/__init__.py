# SPDX-License-Identifier: Apache-2.0
"""Estimate of what a run needs before it starts: memory per device, traffic, FLOPs and seconds; see `command`."""
