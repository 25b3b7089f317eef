# SPDX-License-Identifier: Apache-2.0
"""An edit model in the engine: a batch of several sizes of pictures and source images trains as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    SAMPLING,
    make_batch,
    make_engine,
    own_advantages,
    read_samples,
    stepped_gradients,
    with_own_advantages,
)
from tests.engine.serial import plain_transformer, serial_loss_and_gradient
from tests.tiny_models import build_tiny
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.rows import Samples
from verl_digen.models import load_model
from verl_digen.types import Geometry

pytestmark = pytest.mark.usefixtures("one_rank")

GEOMETRIES = (
    Geometry(32, 32, sources=((32, 64),)),
    Geometry(32, 64, sources=((32, 64),)),
    Geometry(32, 32, sources=((32, 32), (64, 32))),
)
"""A picture's size, a wider picture, and the first size with other images."""


def test_the_gradient_of_three_geometries_is_that_of_the_serial_loop(tmp_path: Path):
    path = build_tiny("qwen_image_edit_plus", tmp_path / "checkpoint")
    model = load_model(path)
    width = model.read_network_config("transformer")["in_channels"]
    batches = [
        make_batch(
            path,
            sampling=replace(SAMPLING, geometry=geometry),
            extras={"source": (model.num_source_tokens(geometry), width)},
            seed=number,
        )
        for number, geometry in enumerate(GEOMETRIES)
    ]

    def fetch(asked: Sequence[FragmentSample]) -> Samples:
        parts = [
            read_samples(batches[int(batch)], [replace(sample, key=key)])
            for sample in asked
            for batch, _, key in [sample.key.partition("/")]
        ]
        return Samples(
            described=asked,
            columns={name: [part.columns[name][0] for part in parts] for name in parts[0].columns},
            conditions=[part.conditions[0] for part in parts],
            advantages=torch.zeros(len(asked)),
        )

    described = [
        replace(sample, key=f"{number}/{sample.key}", uid=f"{number}/{sample.uid}")
        for number, batch in enumerate(batches)
        for sample in with_own_advantages(batch).samples
    ]
    engine = make_engine(path)
    with own_advantages(engine), stepped_gradients(engine) as found:
        engine.begin(len(described), sum(sample.num_steps for sample in described), fetch)
        engine.accumulate(FragmentSpec("all", tuple(described)))
        engine.commit()
    module = plain_transformer(path)
    expected = [serial_loss_and_gradient(module, path, batch, range(len(batch)))[1] for batch in batches]
    for name, gradient in expected[0].items():
        mean = sum(one[name] for one in expected) / len(expected)  # as many rows of each geometry
        torch.testing.assert_close(found[name], mean, atol=1e-5, rtol=1e-4)
        assert gradient.shape == found[name].shape
    assert any((expected[0][name] - expected[2][name]).abs().max() > 1e-3 for name in expected[0])
