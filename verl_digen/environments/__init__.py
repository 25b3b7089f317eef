# SPDX-License-Identifier: Apache-2.0
"""Multi-turn environments: a sample is an episode of several pictures, see `verl_digen.environments.base`."""
