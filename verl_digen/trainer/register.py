# SPDX-License-Identifier: Apache-2.0
"""Importing this registers the trainers with verl; done right after `verl.trainer.ppo.v1` has been imported."""

from verl_digen.trainer import colocated, disaggregated  # noqa: F401 - they register the trainer modes
