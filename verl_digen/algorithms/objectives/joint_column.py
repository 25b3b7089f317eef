# SPDX-License-Identifier: Apache-2.0
"""The joint column of rows that are all in one place, made from their ids. The engine, whose rows lie in tiles and on
ranks, makes it in `verl_digen.engine.tile_work`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_digen.algorithms.objectives.config import LossConfig
from verl_digen.algorithms.objectives.objective import Joint, JointRows
from verl_digen.algorithms.rows import LossInputs


def with_joint_column(
    joint: Joint, consumer: str, inputs: Mapping[str, Tensor], config: LossConfig
) -> dict[str, Tensor]:
    """Copy of `inputs` with the joint column [N]; without gradient.

    Args:
        consumer: who needs it, for errors.
        inputs: as `registry.policy_loss` takes them. Rows under the mask take no part.

    Raises:
        ValueError: an input is missing or misshapen.
    """
    wanted = "group" if joint.needs_groups else "sample"
    missing = [name for name in (wanted, "advantage", *joint.columns, *joint.latents) if name not in inputs]
    if missing:
        there = ", ".join(inputs) or "nothing"
        raise ValueError(
            f"{consumer} needs {joint.column}, or {', '.join(missing)} to make it of; its inputs hold {there}"
        )
    ids = [name for name in ("group", "sample", "point") if name in inputs]
    columns = tuple(dict.fromkeys(("advantage", *joint.columns, *ids)))
    with torch.no_grad():
        rows = LossInputs.check(consumer, inputs, columns=columns, latents=joint.latents)
        place = rows.is_row.nonzero()[:, 0]
        number = torch.arange(len(rows.is_row), device=place.device)
        numbers = {"group": number, "sample": number, "point": torch.zeros_like(number)}
        numbers |= {name: inputs[name].to(place.device).unique(return_inverse=True)[1] for name in ids}
        found = JointRows(
            scalars=joint.scalar(rows)[place],
            samples=numbers["sample"][place],
            groups=numbers["group"][place],
            points=numbers["point"][place],
            advantages=rows["advantage"][place],
        )
        column = torch.ones_like(rows["advantage"])
        column[place] = joint.combine(found, config).to(column)
    return {**inputs, joint.column: column}
