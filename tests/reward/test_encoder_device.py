# SPDX-License-Identifier: Apache-2.0
"""Scorers with encoders compute on the device that they are given, and bring nothing but numbers back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend.process import on_pretend
from tests.reward.tiny_scorers import write_aesthetic_head, write_clip, write_dino, write_hps, write_image_reward
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make

pytestmark = pytest.mark.long


def write_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Tiny checkpoints -> the settings of every scorer."""
    places: dict[str, str] = {}
    for writer in (write_clip, write_dino, write_hps, write_image_reward, write_aesthetic_head):
        place = folder / writer.__name__
        place.mkdir()
        writer(place)
        places[writer.__name__.removeprefix("write_")] = str(place)
    return {
        "pickscore": {"path": places["clip"]},
        "clip_score": {"path": places["clip"]},
        "aesthetic": {"path": places["clip"], "head": places["aesthetic_head"]},
        "hpsv2": {"path": places["hps"], "base": places["hps"]},
        "image_reward": {"path": places["image_reward"], "tokenizer": places["image_reward"]},
        "image_similarity": {"path": places["clip"], "pixel_weight": 0.3},
        "dino": {"path": places["dino"], "reward": "image_similarity"},
    }


def scores_on(device: str, settings: dict[str, dict[str, Any]], source: str) -> dict[str, list[float]]:
    """Scores of every scorer on a device, of pictures and a video."""
    from dataclasses import replace

    from tests.reward.contract import make_picture, make_samples, scores_of

    samples = make_samples()
    samples.append(replace(samples[0], pixels=make_picture(frames=3)))
    samples = [replace(sample, row=replace(sample.row, images=(source,))) for sample in samples]
    found: dict[str, list[float]] = {}
    for name, own in settings.items():
        reward: Any = make(reward_entry(name, {"weight": 1.0, **own}), torch.device(device))
        found[name] = [value for value, _ in scores_of(reward, samples)]
        models = [part for part in (reward, getattr(reward, "encoder", None)) if part is not None]
        tensors = [
            tensor
            for part in models
            for module in vars(part).values()
            if isinstance(module, torch.nn.Module)
            for tensor in module.parameters()
        ]
        assert tensors and {tensor.device.type for tensor in tensors} == {torch.device(device).type}, name
        if device != "cpu":
            del models, tensors
            assert after_a_sleep(reward, samples, name) == found[name], name
    return found


def after_a_sleep(reward: Any, samples: list[Any], name: str) -> list[float]:
    """Scores after a sleep on the pretend device, in which no byte of the reward's modules stayed there."""
    from tests.pretend.memory import memory
    from tests.reward.contract import scores_of

    tensors = [tensor for module in reward.modules() for tensor in (*module.parameters(), *module.buffers())]
    num_bytes = sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
    awake = memory.recount()
    reward.sleep()
    assert num_bytes > 10_000 and awake - memory.recount() == num_bytes, name
    reward.wake()
    assert memory.recount() == awake, name
    return [value for value, _ in scores_of(reward, samples)]


def test_scores_on_a_device_are_those_on_the_cpu(tmp_path):
    from PIL import Image

    from tests.reward.contract import make_picture

    settings, source = write_all(tmp_path), str(tmp_path / "source.png")
    Image.fromarray(make_picture(40, 50, seed=9)).save(source)
    expected = scores_on("cpu", settings, source)
    found = on_pretend(scores_on, "pretend:0", settings, source)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-5), name
