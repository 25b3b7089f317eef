# SPDX-License-Identifier: Apache-2.0
"""Virtual devices, which only wait (`recipe=[...,disaggregated,virtual]`).

Replicas, trainer ranks and reward functions are replaced by durations from a profile; Ray, TransferQueue, agent loop,
planner, conductor and verl's loop are real. So a machine without devices can exercise 16 or 100 of them, optionally
with tensors of real size.
"""
