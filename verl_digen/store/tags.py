# SPDX-License-Identifier: Apache-2.0
"""Conversion between a `SampleTag` and the plain mapping that TransferQueue keeps and verl's replay buffer reads.

| verl's name | means |
| --- | --- |
| `status` | "success": a failed group stores no samples |
| `seq_len` | 1: verl balances tokens, which diffusion has none of |
| `global_steps` | the optimizer step that the sample is for |
| `min_global_steps`, `max_global_steps` | weight versions of its first and last step |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from verl_digen.algorithms.outside import Outside
from verl_digen.types import Geometry, RewardCall, SampleFacts, SampleTag, Sampling
from verl_digen.types.settings import EpisodeFacts, Turn

TAG = "digen"
"""Name of the sample's own facts, beside verl's."""


def to_entry(tag: SampleTag, step: int) -> dict[str, Any]:
    """Plain mapping of a tag; `step` is the optimizer step that the sample is for."""
    return {
        "status": "success",
        "seq_len": 1,
        "global_steps": step,
        "min_global_steps": tag.facts.version,
        "max_global_steps": tag.facts.last_version,
        TAG: {
            **vars(tag),
            "facts": {**vars(tag.facts), "sampling": asdict(tag.facts.sampling)},
            "parts": dict(tag.parts),
            "calls": [asdict(call) for call in tag.calls],
            "episode": None if tag.episode is None else asdict(tag.episode),
        },
    }


def from_entry(entry: Mapping[str, Any]) -> SampleTag:
    """Inverse of `to_entry`, without the step."""
    tag = entry[TAG]
    return SampleTag(
        **{
            **tag,
            "facts": _facts(tag["facts"]),
            "generated": tuple(tag["generated"]),
            "scored": tuple(tag["scored"]),
            "calls": tuple(_call(call) for call in tag["calls"]),
            "episode": None if tag["episode"] is None else _episode(tag["episode"]),
        }
    )


def _facts(facts: Mapping[str, Any]) -> SampleFacts:
    """Read facts; transport makes lists of tuples."""
    tuples = {name: tuple(facts[name]) for name in ("experts", "nodes")}
    return SampleFacts(**{**facts, **tuples, "sampling": _sampling(facts["sampling"])})


def _episode(facts: Mapping[str, Any]) -> EpisodeFacts:
    """Read an episode; transport makes lists of tuples."""
    turns = [
        Turn(**{**turn, "sampling": _sampling(turn["sampling"]), "generated": tuple(turn["generated"])})
        for turn in facts["turns"]
    ]
    return EpisodeFacts(**{**facts, "turns": tuple(turns)})


def _sampling(facts: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**facts, "geometry": _geometry(facts["geometry"]), "outside": Outside(**facts["outside"])})


def _geometry(facts: Mapping[str, Any]) -> Geometry:
    """Read a geometry; transport makes lists of tuples."""
    return Geometry(**{**facts, "sources": tuple((height, width) for height, width in facts["sources"])})


def _call(facts: Mapping[str, Any]) -> RewardCall:
    """Read a call; transport makes lists of tuples."""
    return RewardCall(**{**facts, "counts": tuple((name, number) for name, number in facts["counts"])})


def is_sample(entry: Mapping[str, Any]) -> bool:
    """Tell a sample's entry from a prompt's status."""
    return TAG in entry
