# SPDX-License-Identifier: Apache-2.0
"""The mathematics of RL on flow-matching models: pure functions of torch tensors and the standard library. Import the
modules (`from verl_digen.algorithms import sde`); this package itself imports nothing."""
