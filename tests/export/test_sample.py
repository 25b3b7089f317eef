# SPDX-License-Identifier: Apache-2.0
"""Pictures of a checkpoint's policy are those that a validation saves."""

import asyncio
import json
import shutil
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from safetensors.torch import load_file, save_file
from torch import Tensor

import verl_digen
from tests.engine.harness import LORA, make_engine, perturb, process_group, weights
from tests.export.runs import STEP, digen, save_run, trained_engine
from tests.models.cases import draw_image
from tests.tiny_models import build_tiny
from verl_digen.data.prompts import read_prompts
from verl_digen.models import load_model
from verl_digen.observe.images import save_pixels
from verl_digen.observe.run_files import METRICS
from verl_digen.rollout.server import DiffusersServer
from verl_digen.sampling.requests import sample_request
from verl_digen.store.keys import validation_uid
from verl_digen.tools.export.saved_run import SavedRun, open_run
from verl_digen.trainer.run_output import append_metrics
from verl_digen.weights.checksum import checksum

PROMPTS = ("a red circle", "two small blue squares left of a red circle on a green background")


@pytest.fixture(scope="module", params=[{}, LORA], ids=["full", "lora"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path
) -> Iterator[tuple[Path, dict[str, dict[str, Tensor]]]]:
    """(run's folder, policy -> tensors of a weight update)."""
    folder = tmp_path_factory.mktemp("run")
    with process_group(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "store")):
        engine = trained_engine(tiny_qwen_image, request.param)
        save_run(engine, folder, tiny_qwen_image, request.param)
        sent = {typed: weights(engine, policy=own) for typed, own in (("current", "current"), ("ema", "average"))}
    append_metrics(folder / METRICS, STEP, {"val/reward": 0.5})
    yield folder, sent


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "val.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


def validated(run: SavedRun, sent: dict[str, Tensor], prompts: Path, folder: Path, num: int = 2) -> None:
    """Draw and save the validation pictures of a replica with the weights `sent`, as agent loops do."""
    server = DiffusersServer(run.config.actor_rollout_ref.rollout, run.model_config, num_threads=0)
    with torch.no_grad():
        server._weights.begin_live()(list(sent.items()))
    server._weights.seal(checksum(sent.values()))
    server._weights.switch()
    rows = [
        replace(row, uid=validation_uid(index), index=index)
        for index, row in enumerate(read_prompts(str(prompts), "data.val_files"))
    ]
    asked = [
        sample_request(run.digen, row, index, step=run.step, validate=True) for row in rows for index in range(num)
    ]

    async def generate() -> list[Any]:
        made = []
        for first in range(0, len(asked), num):  # prompt by prompt, as the command draws them
            requests = asked[first : first + num]
            made += await asyncio.gather(*[server._batcher.submit(request) for request in requests])
        return made

    for request, made in zip(asked, asyncio.run(generate()), strict=True):
        number = int(request.uid.removeprefix("val-"))
        path = folder / f"{number:05d}-{request.sample_index:02d}.png"
        save_pixels(made.pixels, path, rows[number].images, made.audio)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def waveform(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)


def run_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint's network, by name."""
    return dict(load_model(path).load_transformer(torch.float32).state_dict())


@pytest.mark.parametrize("policy", ["current", "ema"])
def test_pictures_are_those_of_validation(saved, policy: str, prompts: Path, tmp_path: Path):
    folder, sent = saved
    validated(open_run(folder, None, None), sent[policy], prompts, tmp_path / "expected", num=3)
    out = tmp_path / "out"
    assert digen("sample", folder, "--prompts", prompts, "--policy", policy, "--num", 3, "--output", out) == 0
    expected = sorted(tmp_path.glob("expected/*.png"))
    assert [path.name for path in sorted(out.iterdir())] == [*(path.name for path in expected), "grid.png"]
    for path in expected:
        assert abs(pixels(out / path.name) - pixels(path)).max() <= 1, path.name
    assert abs(pixels(expected[0]) - pixels(expected[1])).max() > 8, "samples of a prompt have noise of their own"
    drawn = verl_digen.Run(folder).sample(PROMPTS, num=3, policy=policy)
    for path, picture in zip(expected, drawn, strict=True):
        assert (np.asarray(picture) == pixels(out / path.name)).all(), "a program draws what the command draws"


def test_pixels_that_are_not_finite_are_no_picture(saved, tiny_qwen_image: Path, tmp_path: Path, capsys):
    broken, out = tmp_path / "broken", tmp_path / "out"
    shutil.copytree(tiny_qwen_image, broken)
    (file,) = (broken / "vae").glob("*.safetensors")
    save_file({name: value.fill_(torch.nan) for name, value in load_file(file).items()}, file)
    assert digen("sample", saved[0], "--base", broken, "--prompt", "a circle", "--output", out) == 2
    assert "of group val-00000 must have finite pixels, got NaN" in capsys.readouterr().err and not out.exists()


def test_videos_have_the_sound_of_validation(tiny_ltx2: Path, prompts: Path, tmp_path: Path):
    size = {"height_px": 64, "width_px": 64, "num_frames": 9}
    with process_group(0, 1, str(tmp_path / "store")):
        engine = make_engine(tiny_ltx2, digen={"sampling": size})
        save_run(engine, tmp_path / "run", tiny_ltx2, {}, sampling=size)
    run = open_run(tmp_path / "run", None, None)
    validated(run, run_weights(tiny_ltx2), prompts, tmp_path / "expected")
    out = tmp_path / "out"
    assert digen("sample", tmp_path / "run", "--prompts", prompts, "--num", 2, "--output", out) == 0
    expected = sorted(path.name for path in tmp_path.glob("expected/*.wav"))
    assert expected == sorted(path.name for path in out.glob("*.wav")) and len(expected) == 4
    sounds = [waveform(tmp_path / "expected" / name) for name in expected]
    for name, sound in zip(expected, sounds, strict=True):
        assert abs(waveform(out / name) - sound).max() <= 2, name
    assert abs(sounds[0] - sounds[1]).max() > 100, "samples of a prompt have noise of their own"


SQUARE, VIDEO = {"height_px": 32, "width_px": 32}, {"height_px": 32, "width_px": 32, "num_frames": 5}


@pytest.mark.parametrize(
    ("name", "sampling", "has_image", "suffixes"),
    [
        ("qwen_image_edit_plus", SQUARE | {"image_px": 64}, True, {".png"}),
        ("wan2.1", VIDEO, False, {".png", ".gif"}),
        ("wan2.1_i2v", VIDEO, True, {".png", ".gif"}),
    ],
)
def test_edits_and_videos_are_those_of_validation(
    name: str, sampling: dict[str, int], has_image: bool, suffixes: set[str], tmp_path: Path
):
    """An edit's picture stands beside its source; a video is a filmstrip and a GIF."""
    path = build_tiny(name, tmp_path / "checkpoint")
    with process_group(0, 1, str(tmp_path / "store")):
        engine = make_engine(path, digen={"sampling": sampling})
        perturb(engine)
        save_run(engine, tmp_path / "run", path, {}, sampling=sampling)
        sent = weights(engine, policy="current")
    prompts = prompts_file(tmp_path, has_image=has_image)
    validated(open_run(tmp_path / "run", None, None), sent, prompts, tmp_path / "expected")
    out = tmp_path / "out"
    assert digen("sample", tmp_path / "run", "--prompts", prompts, "--num", 2, "--output", out) == 0
    expected = sorted(path.name for path in (tmp_path / "expected").iterdir())
    assert expected == sorted(path.name for path in out.iterdir() if path.name != "grid.png")
    assert {Path(name).suffix for name in expected} == suffixes and len(expected) == 4 * len(suffixes)
    for each in expected:
        drawn, saved = frames(out / each), frames(tmp_path / "expected" / each)
        difference = abs(drawn - saved)
        assert drawn.shape == saved.shape, each
        # a pixel that is rounded otherwise changes the 256 colours of a GIF, and so other pixels
        assert difference.mean() < 4 if each.endswith(".gif") else difference.max() <= 1, each
    first, second = (frames(out / f"00000-{index:02d}.png") for index in (0, 1))
    assert abs(first - second).mean() > 8, "samples of a prompt have noise of their own"
    if has_image:
        other = frames(out / "00001-00.png")
        assert abs(first - other).max() > 8, "prompts have images of their own"


def prompts_file(folder: Path, *, has_image: bool) -> Path:
    """A prompt file, each prompt with an image of its own if `has_image`."""
    rows = []
    for index, text in enumerate(PROMPTS):
        image = folder / f"source-{index}.png"
        draw_image(image, (48, 48), index)
        rows.append({"prompt": text} | ({"images": [str(image)]} if has_image else {}))
    file = folder / "val.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def frames(path: Path) -> np.ndarray:
    """Pixels [F, H, W, 3] of all frames of a picture or a GIF."""
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(image)])


def test_settings_of_the_command_line_replace_those_of_the_run(saved, tmp_path: Path):
    folder, _ = saved
    words = ["--prompt", PROMPTS[0], "--num", 1]
    assert digen("sample", folder, *words, "--size", "64x32", "--output", tmp_path / "small") == 0
    assert Image.open(tmp_path / "small" / "00000-00.png").size == (32, 64)
    drawn = {}
    for name, more in {"own": [], "again": [], "seed": ["--seed", 99], "steps": ["--steps", 9]}.items():
        assert digen("sample", folder, *words, *more, "--output", tmp_path / name) == 0
        drawn[name] = pixels(tmp_path / name / "00000-00.png")
    assert (drawn["own"] == drawn["again"]).all()
    assert abs(drawn["seed"] - drawn["own"]).max() > 8
    assert (drawn["steps"] != drawn["own"]).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of --prompt and --prompts must be given"),
        (
            ["--prompt", "caf\udce9"],
            "--prompt must be text in UTF-8, got 'caf\\udce9'; write it so to a file for --prompts",
        ),
        (["--prompt", "a", "--policy", "old"], "--policy must be one of current, ema"),
        (["--prompt", "a", "--steps", 1], "digen.sampling.val_num_steps must lie in [2, 1000]"),
        (["--prompt", "a", "--size", "33x32"], "height_px"),
    ],
)
def test_what_cannot_be_drawn_is_refused(saved, words: list, message: str, tmp_path: Path, capsys):
    assert digen("sample", saved[0], *words, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
