# SPDX-License-Identifier: Apache-2.0
"""Samples of a `diffusers` replica, and their comparison with a `vllm_omni` replica's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.rollout.test_server import generate, make_server
from tests.vllm_omni.conftest import RUN_SEED
from verl_digen.types import Generation, SampleRequest

TOLERANCE = 1e-5
COMPUTED = ("latents", "log_probs", "clean")
"""Columns of a record that the network's output decides; the others are equal bit for bit."""


def by_diffusers(path: Path, requests: Sequence[SampleRequest]) -> list[Generation]:
    """Samples generated one after the other, with the checkpoint's weights in fp32."""
    return generate(make_server(path, max_batch_size=1, seed=RUN_SEED), requests)


def assert_same(got: Generation, expected: Generation) -> None:
    ours, theirs = got.trajectory, expected.trajectory
    assert type(ours.record) is type(theirs.record)
    for name in ("uid", "sample_index", "seed", "num_steps", "sampling", "condition_key", "experts", "nodes"):
        assert getattr(ours.facts, name) == getattr(theirs.facts, name), name
    for name, column in ours.record.columns().items():
        atol = TOLERANCE if name in COMPUTED else 0
        torch.testing.assert_close(column, theirs.record.columns()[name], atol=atol, rtol=0)
    assert got.pixels.shape == expected.pixels.shape
    assert (got.pixels.int() - expected.pixels.int()).abs().max() <= 1
    assert (got.audio is None) == (expected.audio is None)
    if got.audio is not None and expected.audio is not None:
        assert got.audio.rate_hz == expected.audio.rate_hz
        np.testing.assert_allclose(got.audio.waveform, expected.audio.waveform, atol=TOLERANCE, rtol=0)
    found, wanted = (
        {**vars(one), "latents": None if one.latents is None else vars(one.latents)} for one in (got, expected)
    )
    for name in ("condition", "negative_condition", "latents"):
        mine, yours = found[name], wanted[name]
        assert (mine is None) == (yours is None)
        if mine is not None:
            torch.testing.assert_close(mine, yours, atol=TOLERANCE, rtol=0)
