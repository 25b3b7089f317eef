# SPDX-License-Identifier: Apache-2.0
"""Lengths of the texts of rows: how samples are ordered so that tiles need little padding, and how much they have."""

from __future__ import annotations

from verl_digen.models.base import DiffusionModel
from verl_digen.store.conditions import ConditionPair
from verl_digen.types import TrainingRows


def text_order(model: DiffusionModel, pair: ConditionPair) -> tuple[int, ...]:
    """Lengths of a sample's texts, the longest first, then each; () where all are of one length for the network.

    Example: a prompt of 40 tokens and a negative prompt of 5
        text_order(model, pair)  # (40, 40, 5)
    """
    lengths = [length for condition in pair if condition is not None for length in model.text_lengths(condition)]
    return (max(lengths), *lengths) if lengths else ()


def padded_tokens(model: DiffusionModel, rows: TrainingRows) -> tuple[int, int]:
    """(text tokens that a forward of the rows reads, padding among them); negative prompts are included.

    Example: prompts of 40 and 30 tokens without guidance
        padded_tokens(model, rows)  # (80, 10)
    """
    branches = [list(rows.conditions)]
    if rows.sampling.is_guided and rows.negative_conditions is not None:
        branches.append(list(rows.negative_conditions))
    if not model.keeps_lengths_apart:  # both branches in one forward
        branches = [[condition for branch in branches for condition in branch]]
    total = padding = 0
    for branch in branches:
        for lengths in zip(*(model.text_lengths(condition) for condition in branch), strict=True):
            total += max(lengths) * len(lengths)
            padding += max(lengths) * len(lengths) - sum(lengths)
    return total, padding
