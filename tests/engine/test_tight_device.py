# SPDX-License-Identifier: Apache-2.0
"""Automatic tiles of a real engine on a pretended device with little memory, where a row takes a known number of bytes.

The device knows weights, Adam's moments (as many bytes as the engine's optimizer holds) and the rows of a tile. A tile
that does not fit raises what torch raises.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.cases import REWARDS, Case
from tests.engine.harness import (
    TEXT_WIDTH,
    assert_close,
    assert_equal,
    begin,
    fragment,
    gradients,
    make_batch,
    make_engine,
    peek,
    read_samples,
)
from tests.tiny_models import build_tiny
from verl_digen.engine import memory, planning
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.policies import Evaluated, PolicyForward
from verl_digen.engine.rows import make_rows
from verl_digen.platforms import device_memory
from verl_digen.schedulers.tiles import Row
from verl_digen.types import TrainingRows

pytestmark = pytest.mark.usefixtures("one_rank")

ALL = ("g0", "g1", "g2")


def tokens(rows: TrainingRows) -> int:
    return max(len(condition["embeds"]) for condition in rows.conditions)


class TightDevice(PolicyForward):
    """Memory in units of the trained weights' bytes, which take 2 units (weights and gradient).

    Args:
        capacity: units of the device. row: units of `count` rows with prompts of so many tokens.
    """

    def __init__(self, engine: DiffusersFSDPEngine, capacity: float, row: Callable[[int, int], float]):
        vars(self).update(vars(engine.forward))
        self.engine, self.row = engine, row
        self.unit = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
        self.capacity = capacity * self.unit
        self.tiles: list[tuple[int, int]] = []
        """(rows, tokens) of every forward."""
        self.num_shortages = 0
        """Forwards that ran out of memory."""
        self._peak = 0

    def __call__(self, rows: TrainingRows) -> Evaluated:
        needs = self.memory_allocated() + int(self.row(len(rows), tokens(rows)) * self.unit)
        if needs > self.capacity:
            self.num_shortages += 1
            raise torch.OutOfMemoryError(f"tried to allocate {needs} of {self.capacity} bytes")
        self._peak = max(self._peak, needs)
        self.tiles.append((len(rows), tokens(rows)))
        return super().__call__(rows)

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """Make it the engine's device."""
        self.engine.forward = self
        patch.setattr(device_memory, "get_platform", lambda: SimpleNamespace(device_module=self, synchronize=bool))
        for module in (device_memory, planning):
            patch.setattr(module, "get_device_name", lambda: "pretend")

    def sizes(self, num_tokens: int | None = None) -> set[int]:
        """Rows of the tiles, measured or trained, with prompts of so many tokens at most."""
        return {count for count, length in self.tiles if num_tokens in (None, length)}

    def memory_allocated(self) -> int:
        states = self.engine.optimizer.state.values()
        moments = [value for state in states for value in state.values() if value.numel() > 1]
        return 2 * self.unit + sum(value.numel() * value.element_size() for value in moments)

    def memory_reserved(self) -> int:
        return self.memory_allocated()

    def max_memory_allocated(self) -> int:
        return self._peak

    def reset_peak_memory_stats(self) -> None:
        self._peak = self.memory_allocated()

    def mem_get_info(self) -> tuple[int, int]:
        return int(self.capacity) - self.memory_allocated(), int(self.capacity)

    def empty_cache(self) -> None:
        pass


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tiny_qwen_image: Path) -> Callable[..., tuple[Any, TightDevice]]:
    """Makes an engine on a tight device."""

    def make(
        capacity: float,
        row: Callable[[int, int], float],
        tsp: dict[str, int] | None = None,
        path: Path = tiny_qwen_image,
    ) -> tuple[Any, TightDevice]:
        engine = make_engine(path, digen={"advantage": {"scale": "group"}, "tsp": tsp or {}})
        device = TightDevice(engine, capacity, row)
        device.put_in(monkeypatch)
        return engine, device

    return make


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return Case().make_batch(tiny_qwen_image)


def with_prompts(batch: TensorDict, **lengths: int) -> TensorDict:
    """`batch` with prompts of so many tokens, by group."""
    given = {uid: ({"embeds": torch.randn(length, TEXT_WIDTH)}, None) for uid, length in lengths.items()}
    copy = batch.clone()
    tu.assign_non_tensor(copy, conditions=tu.get(batch, "conditions") | given)
    return copy


def step(engine: DiffusersFSDPEngine, batch: TensorDict, *fragments: tuple[str, ...]) -> None:
    """One optimizer step, with the groups of each fragment."""
    groups = begin(engine, batch, REWARDS)
    for uids in fragments:
        engine.accumulate(fragment(groups, *uids))
    engine.commit()


def test_a_tile_leaves_room_for_moments_that_the_first_step_makes(pretend: Any, batch: TensorDict):
    """A row takes 0.75 of 5 units that are left: 6 fit beside the moments, 9 would without them."""
    engine, device = pretend(capacity=10, row=lambda count, length: 0.75 * count)
    for _ in range(2):
        step(engine, batch, ALL)
    assert device.sizes() == {1, 2, 4, 6}  # 1, 2 and 4 are measured, 18 are trained


def test_longer_prompts_are_measured_again(pretend: Any, batch: TensorDict):
    """A row takes a unit per 100 tokens. Prompts of up to 64 are measured as such of 64, those of 130 as of 192."""
    engine, device = pretend(capacity=10, row=lambda count, length: count * length / 100)
    step(engine, with_prompts(batch, g0=3, g1=64, g2=130), *((uid,) for uid in ALL))
    assert device.sizes(3) == {5, 4}  # 9 rows, and 1 + (5 - 0.64) // 0.64 = 7 fit
    assert device.sizes(64) == {1, 2, 3, 4}  # measured with the first group; 3 rows
    assert device.sizes(130) == {2}  # 6 rows, and 1 + (5 - 1.92) // 1.92 = 2 fit
    assert device.sizes(192) == {1, 2}


def test_prompts_of_one_length_are_measured_with_their_negative_ones(pretend: Any, tmp_path: Path):
    """Stable Diffusion 3 stacks both, so neither may be padded. 5 rows fit, and 12 are trained in tiles of 4."""
    path = build_tiny("sd3", tmp_path / "sd3")
    guided = make_batch(path, group_size=2, true_cfg_scale=2.0, pooled_width=24)
    engine, device = pretend(capacity=10, row=lambda count, length: count, path=path)
    groups = begin(engine, guided, REWARDS[:4])
    engine.accumulate(fragment(groups, "g0", "g1"))
    engine.commit()
    assert device.sizes(3) == device.sizes() == {1, 2, 4}


def test_a_rehearsal_that_runs_out_of_memory_leaves_one_row_and_the_gradient(pretend: Any, batch: TensorDict):
    """Two rows with long prompts take more than twice as much as one; no measurement of one row shows it."""
    engine, device = pretend(capacity=20, row=lambda count, length: 50 if length > 64 and count > 1 else count)
    long = with_prompts(batch, g1=70)
    groups = begin(engine, long, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    held = {key: piece.clone() for key, piece in peek(engine).items()}
    rehearsed = make_rows(engine.points, read_samples(long), [(4, [0])] * 2)
    with pytest.raises(torch.OutOfMemoryError):
        engine.planner.rehearse(rehearsed)
    assert_equal(peek(engine), held)
    engine.accumulate(fragment(groups, "g1"))
    assert device.sizes(70) == {1}
    assert not device.sizes(128) - {1}
    engine.commit()


def test_a_row_that_does_not_fit_is_an_error_that_says_what_to_do(pretend: Any, batch: TensorDict):
    engine, _ = pretend(capacity=3, row=lambda count, length: 2 * count)
    groups = begin(engine, batch, REWARDS)
    with pytest.raises(
        RuntimeError, match=r"digen.tsp must .*a rehearsed tile of 1 row.*enable_activation_offload=true"
    ):
        engine.accumulate(fragment(groups, *ALL))


def test_a_tile_that_does_not_fit_after_all_names_settings_with_which_its_checkpoint_goes_on(
    pretend: Any, batch: TensorDict, tmp_path: Path
):
    """6 rows fit at first, and half of them when half the memory is gone. No weight or moment is lost by the way."""
    engine, device = pretend(capacity=10, row=lambda count, length: 0.75 * count)
    step(engine, batch, ALL)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    device.capacity *= 0.75
    groups = begin(engine, batch, REWARDS)
    with pytest.raises(RuntimeError, match=r"a tile of 6 row.*did not \(tried to") as shortage:
        engine.accumulate(fragment(groups, *ALL))
    (settings,) = re.findall(r"; set (\S+ \S+)$", str(shortage.value))
    tsp = {name: int(value) for name, value in re.findall(r"digen\.tsp\.(\w+)=(\d+)", settings)}
    assert tsp == {"samples_per_tile": 1, "steps_per_tile": 3}

    def resumed(capacity: float, tsp: dict[str, int]) -> tuple[dict[str, Any], TightDevice]:
        engine, device = pretend(capacity, lambda count, length: 0.75 * count, tsp)
        engine.load_checkpoint(str(tmp_path))
        return gradients(engine, batch)[0], device

    found, smaller = resumed(7.5, tsp)
    assert max(smaller.sizes()) == 3 and smaller.num_shortages == 0
    assert_close(found, resumed(40, {})[0], 1e-5)


@pytest.mark.parametrize(
    ("state", "settings"),
    [
        (
            (0, False, "batch"),
            "set actor_rollout_ref.model.recompute_blocks=all actor_rollout_ref.model.enable_activation_offload=true "
            "digen.tsp.reduce=tile; if that is not enough, use more devices",
        ),
        ((sys.maxsize, True, "fragment"), "set digen.tsp.reduce=tile; if that is not"),
        ((sys.maxsize, True, "tile"), "use more devices, let devices share a row"),
    ],
)
def test_one_row_too_many_names_the_settings_that_are_left(state: tuple[int, bool, str], settings: str):
    blocks: Any = SimpleNamespace(num_blocks=state[0], share=0.5, offloads=state[1])
    assert memory.smaller_row(blocks, state[2]).startswith(settings)


@pytest.mark.parametrize(("counts", "settings"), [((3,) * 6, (3, 3)), ((1, 1), (1, 1)), ((4, 1, 1, 1), (1, 3))])
def test_a_smaller_tile_has_at_most_half_of_the_rows(counts: tuple[int, ...], settings: tuple[int, int]):
    rows = [Row(sample, point, 0) for sample, count in enumerate(counts) for point in range(count)]
    found = memory.smaller_tile(rows)
    assert found == f"set digen.tsp.samples_per_tile={settings[0]} digen.tsp.steps_per_tile={settings[1]}"
    assert settings[0] * settings[1] <= len(rows) / 2


def test_state_that_is_offloaded_or_not_made_yet_is_counted():
    weights = torch.nn.Linear(3, 5)
    weights.bias.requires_grad = False
    optimizer = torch.optim.AdamW(weights.parameters())
    assert memory.state_to_come(None) == 0
    assert memory.state_to_come(optimizer) == 2 * 15 * 4
    weights(torch.ones(3)).sum().backward()
    optimizer.step()
    assert memory.state_to_come(optimizer) == 0
    state = optimizer.state[weights.weight]
    state["exp_avg"] = state["exp_avg"].to("meta")  # stands for another device than the weights'
    assert memory.state_to_come(optimizer) == 15 * 4
