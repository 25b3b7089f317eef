# SPDX-License-Identifier: Apache-2.0
"""Partitions of TransferQueue. verl's replay buffer takes the first two by name."""

from __future__ import annotations

TRAIN = "train"
"""Samples that wait for the trainer, and the status of their prompts."""
VAL = "val"
"""Samples of a validation, and the status of their prompts."""
CONDITIONS = "digen_conditions"
"""Prompt conditions."""
