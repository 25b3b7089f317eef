# SPDX-License-Identifier: Apache-2.0
"""Devices that only take time (`recipe=[...,disaggregated,virtual]`).

Replicas, trainer ranks and reward functions are replaced by durations of a profile; Ray, TransferQueue, agent loop,
planner, conductor and verl's loop run for real. So 16 or 100 devices are exercised on a machine that has none, with
tensors of real size where that is asked for.
"""
