# SPDX-License-Identifier: Apache-2.0
"""Processes that share the tokens of samples, by gloo, against one process: equal samples, and no hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from tests.engine import harness  # noqa: F401 - its forkserver has imported what ranks need
from tests.engine.sequence_cases import CASES, IMAGE, build
from tests.grid import in_grid
from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs, source_image
from verl_digen.models import load_model
from verl_digen.models.experts import networks_of
from verl_digen.models.sequence import split_networks
from verl_digen.rollout.fingerprint import GEOMETRY, PROMPT, fingerprint
from verl_digen.rollout.lockstep import Leader, OutOfStep, find_store, follow, join_group, open_store
from verl_digen.sampling.sampler import Sampler, SamplingStopped
from verl_digen.types import PathRecord, SampleRequest, Sampling
from verl_digen.weights.receiver import WeightReceiver

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ATOL = 1e-5
LONG_S = 300.0
SHORT_S = 2.0
"""Bound of a collective where a test waits for all of it."""


@dataclass(frozen=True)
class Shared:
    """Processes that generate for one checkpoint."""

    case: str
    size: int = 2
    is_lora: bool = False
    scale: float = 3.0
    """Guidance, whose two branches have prompts of different lengths."""

    def __str__(self) -> str:
        return f"{self.case}, {'LoRA' if self.is_lora else 'full'}, {self.size} ranks, guidance {self.scale:g}"


QUICK = (Shared("wan2.1"), Shared("hunyuan_video"))
LONG = (
    Shared("wan2.1", is_lora=True),
    Shared("hunyuan_video", size=4),
    Shared("hunyuan_video15"),
    Shared("flux_dev", scale=1.0),
)
GRID = (
    Shared("wan2.1", size=4, scale=1.0),
    Shared("wan2.2_a14b"),
    Shared("wan2.2_ti2v_5b"),
    Shared("hunyuan_video", is_lora=True),
    Shared("qwen_image"),
    Shared("qwen_image_edit_plus"),
)


def loaded(asked: Shared, path: Path) -> tuple[Any, nn.Module, nn.Module]:
    """(model, transformer, transformer in peft's wrapper, whose adapter is not zero)."""
    model = load_model(path)
    transformer = model.load_transformer(torch.float32)
    config = None
    if asked.is_lora:
        from peft import LoraConfig

        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(CASES[asked.case].lora))
    wrapped = WeightReceiver(transformer, config, model.experts).module
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(wrapped.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, transformer, wrapped


def requests_of(asked: Shared, path: Path | None = None) -> list[SampleRequest]:
    """Three samples, SDE steps included; prompts differ in length, and two ranks divide none of them.

    Args:
        path: folder with the image of a model that reads one.
    """
    sampling = Sampling(CASES[asked.case].geometry, 3, true_cfg_scale=asked.scale, law="flow", noise_level=0.7)
    sources = sampling.geometry.sources if path else ()
    images = tuple(source_image(f"{path}/{IMAGE}") for _ in sources)
    window, negative = Window((0, 1), (0, 1)), PromptInputs("", images, 64)
    texts = ("a cat", "a cat that looks at a dog", "a dog")
    return [
        SampleRequest(f"p{number}", 0, PromptInputs(text, images, 64), negative, window, sampling, False)
        for number, text in enumerate(texts)
    ]


def generated(asked: Shared, model: Any, wrapped: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Latents and log-probs of `requests_of`, and the probe's numbers."""
    encode, requests = model.load_encoder(torch.float32, CPU), requests_of(asked, model.path)
    positive = encode([request.inputs for request in requests])
    negative = encode([request.branches[1] for request in requests]) if asked.scale > 1 else None
    sampler = Sampler(model, wrapped, run_seed=7, device=CPU, latents_dtype=torch.float32)
    trajectories, latents = sampler.sample(requests, positive, negative, version=0, **options)
    records = [trajectory.record for trajectory in trajectories if isinstance(trajectory.record, PathRecord)]
    return {
        "latents": latents,
        "path": torch.stack([each.latents for each in records]),
        "log_probs": torch.stack([each.log_probs for each in records]),
        "probe": torch.tensor(fingerprint(model, wrapped, encode([PromptInputs(PROMPT)])[0])),
    }


# -- ranks --------------------------------------------------------------------------------------------------------
Scenario = Callable[[Leader, Any, nn.Module, Shared], Any]
"""Runs on the leader: (leader, model, wrapped network, ...)."""


def lead_twice(leader: Leader, model: Any, wrapped: nn.Module, asked: Shared) -> Any:
    """A batch that is stopped between two forwards, then a whole one; with the tokens of this rank in each output."""
    num_tokens: set[int] = set()
    names = [name for name, _ in wrapped.named_modules() if name.endswith("proj_out")]
    last = wrapped.get_submodule(min(names, key=len))
    last.register_forward_pre_hook(lambda module, args: num_tokens.add(args[0].shape[1]))
    answers = iter([False, True])
    with pytest.raises(SamplingStopped), leader.session(lambda: None):
        generated(asked, model, wrapped, should_stop=lambda: next(answers))
    with leader.session(lambda: None):
        return generated(asked, model, wrapped) | {"num_tokens": num_tokens}


def lead_outside_of_a_session(leader: Leader, model: Any, wrapped: nn.Module, asked: Shared) -> str:
    with pytest.raises(RuntimeError, match="must run inside a session") as raised:
        generated(asked, model, wrapped)
    with leader.session(lambda: None):
        pass
    return str(raised.value)


def lead_and_fail_in_a_forward(leader: Leader, model: Any, wrapped: nn.Module, asked: Shared) -> str:
    def fail(*args: Any) -> None:
        raise ArithmeticError("half-way")

    wrapped.get_submodule("blocks.1").register_forward_pre_hook(fail)
    with pytest.raises(OutOfStep) as raised, leader.session(lambda: None):
        generated(asked, model, wrapped)
    return str(raised.value)


def lead_alone(leader: Leader, model: Any, wrapped: nn.Module, asked: Shared) -> str:
    with pytest.raises(OutOfStep) as raised, leader.session(lambda: None):
        generated(asked, model, wrapped)
    return str(raised.value)


def die(*args: Any) -> None:
    os._exit(3)


def hang(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _rank(
    rank: int,
    port: int,
    path: Path,
    asked: Shared,
    num_sessions: int,
    timeout_s: float,
    scenario: Scenario,
    breaks: Callable[..., None] | None,
) -> None:
    torch.set_num_threads(1)
    mesh = join_group(find_store(port, LONG_S), rank, asked.size, CPU, timeout_s)
    model, transformer, wrapped = loaded(asked, path)
    split_networks(model, wrapped, mesh)
    if rank == 0:
        found = scenario(Leader(networks_of(transformer), CPU), model, wrapped, asked)
        torch.save(found, path / "found.pt")
    else:
        if breaks is not None:
            wrapped.get_submodule("blocks.1").register_forward_pre_hook(breaks)
        for _ in range(num_sessions):
            follow(networks_of(transformer), CPU)
    os._exit(0)  # without waiting for ranks that are gone


def on_ranks(
    path: Path,
    asked: Shared,
    scenario: Scenario,
    *,
    num_sessions: int = 1,
    timeout_s: float = LONG_S,
    breaks: Callable[..., None] | None = None,
) -> Any:
    """Result of `scenario` on the leader; `breaks` is called inside the followers' first forward."""
    store = open_store(LONG_S)
    args = (store.port, path, asked, num_sessions, timeout_s, scenario, breaks)
    context = mp.start_processes(_rank, args, nprocs=asked.size, join=False, start_method="forkserver")  # type: ignore
    assert context is not None
    leader, *followers = context.processes
    try:
        leader.join(LONG_S)
        assert leader.exitcode == 0
    finally:
        for process in followers:
            process.kill()
    return torch.load(path / "found.pt", weights_only=False)


# -- claims -------------------------------------------------------------------------------------------------------
def compare(asked: Shared, path: Path) -> None:
    build(CASES[asked.case], path, num_heads=max(2, asked.size))
    model, _, wrapped = loaded(asked, path)
    model.sequence_size = asked.size  # for the probe's picture
    expected = generated(asked, model, wrapped)
    found = on_ranks(path, asked, lead_twice, num_sessions=2)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}")
    pictures = CASES[asked.case].geometry, replace(GEOMETRY, width_px=GEOMETRY.width_px * asked.size)
    tokens = [model.num_tokens(picture) + model.num_source_tokens(picture) for picture in pictures]
    assert found["num_tokens"] == {number // asked.size for number in tokens}
    changed = generated(replace(asked, scale=asked.scale + 0.1), model, wrapped)
    assert (changed["latents"] - expected["latents"]).abs().max() > 10 * ATOL or asked.scale == 1.0


@pytest.mark.parametrize("asked", QUICK, ids=str)
def test_two_processes_generate_the_samples_of_one(asked: Shared, tmp_path: Path) -> None:
    compare(asked, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("asked", [*LONG, *in_grid(GRID)], ids=str)
def test_processes_generate_the_samples_of_one(asked: Shared, tmp_path: Path) -> None:
    compare(asked, tmp_path)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CASES["wan2.1"], tmp_path_factory.mktemp("wan") / "checkpoint")


def test_a_forward_outside_of_a_session_is_refused(wan: Path) -> None:
    assert "session" in on_ranks(wan, QUICK[0], lead_outside_of_a_session)


def test_an_error_inside_a_forward_of_the_leader_puts_the_ranks_out_of_step(wan: Path) -> None:
    assert "left a forward" in on_ranks(wan, QUICK[0], lead_and_fail_in_a_forward)


@pytest.mark.parametrize("breaks", [die, hang])
def test_a_follower_that_dies_or_hangs_is_an_error_of_the_leader(wan: Path, breaks: Callable[..., None]) -> None:
    timeout_s = SHORT_S if breaks is hang else LONG_S
    assert "do not run the same forwards" in on_ranks(wan, QUICK[0], lead_alone, timeout_s=timeout_s, breaks=breaks)
