# SPDX-License-Identifier: Apache-2.0
"""What a run will need, before it is started: memory of every device, traffic, FLOPs and seconds; see `command`."""
