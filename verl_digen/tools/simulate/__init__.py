# SPDX-License-Identifier: Apache-2.0
"""Simulation of a run on a cluster, from a profile of its model: `digen simulate`."""
