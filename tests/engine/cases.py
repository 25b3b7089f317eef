# SPDX-License-Identifier: Apache-2.0
"""Logical batches that are trained fragment by fragment, for one rank and for two, and their expected results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.engine.harness import (
    LORA,
    assert_close,
    assert_same_projection,
    begin,
    fragment,
    local_weights,
    make_batch,
    make_engine,
    perturb,
    stepped_gradients,
    weights,
    with_advantages,
)
from tests.engine.serial import plain_module, plain_transformer, serial_loss_and_gradient
from verl_digen.algorithms.rows import numbers
from verl_digen.engine.copies import AVERAGE
from verl_digen.engine.engine import DiffusersFSDPEngine

WINDOWS = ((0, 1, 2), (1,), (0, 2))
"""Windows of 9 samples with 3, 1 or 2 trained steps: 18 rows."""
REWARDS = [1.0, 9.0, 3.0, 5.0, 4.0, 4.5, 0.0, 0.0, 25.0]
"""Widely spread: centred rewards exceed the clip before they are divided by the scale, and most do not afterwards."""
CLIP = 1.2
"""Less than the largest advantage of every scale, so that clamping binds."""
KL = 0.3


@dataclass(frozen=True)
class Case:
    """One logical batch: how it is trained, and the order of its fragments."""

    order: tuple[tuple[str, ...], ...] = (("g2",), ("g0",), ("g1",))
    scale: str = "batch"
    kl: str | None = None
    tsp: dict[str, Any] = field(default_factory=dict)
    is_lora: bool = False
    true_cfg_scale: float = 1.0
    fsdp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    clip: float = CLIP
    kernels: dict[str, Any] = field(default_factory=dict)

    def make_engine(self, path: Path) -> DiffusersFSDPEngine:
        """Engine with other weights than the checkpoint's, so that the KL term and adapters are not zero."""
        digen: dict[str, Any] = {
            "tsp": self.tsp,
            "advantage": {"scale": self.scale},
            "loss": {"advantage_clip": self.clip},
            "sampling": {"true_cfg_scale": self.true_cfg_scale},
            **self.kernels,
        }
        if self.kl is not None:
            digen["kl"] = {"coef": KL, "kind": self.kl}
        engine = make_engine(
            path,
            digen=digen,
            model=(LORA if self.is_lora else {}) | self.model,
            fsdp=self.fsdp,
            optim={"clip_grad": 1e9},
        )
        perturb(engine, scale=0.1 if self.is_lora else 0.02)
        return engine

    def make_batch(self, path: Path) -> TensorDict:
        return make_batch(path, windows=WINDOWS, true_cfg_scale=self.true_cfg_scale)

    def committed(self, path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
        """(gradient that the optimizer step found, metrics) of the case's fragments."""
        engine, batch = self.make_engine(path), self.make_batch(path)
        groups = begin(engine, batch, REWARDS)
        for uids in self.order:
            engine.accumulate(fragment(groups, *uids))
        with stepped_gradients(engine) as found:
            outputs = engine.commit()
        return found, numbers(outputs["metrics"])

    def serial(self, path: Path) -> tuple[float, dict[str, Tensor]]:
        """(loss, gradient) of the slow reference: all rewards known, one row at a time. One rank."""
        engine, batch = self.make_engine(path), self.make_batch(path)
        return serial_loss_and_gradient(
            plain_module(engine, path, weights(engine)),
            path,
            with_advantages(batch, REWARDS, self.scale, self.clip),
            range(len(REWARDS)),
            reference=plain_transformer(path) if self.kl else None,
            kl_coef=KL,
            kl_kind=self.kl or "flow_grpo",
            true_cfg_scale=self.true_cfg_scale,
        )

    def assert_serial(self, path: Path, gradient: dict[str, Tensor], metrics: dict[str, float]) -> None:
        """The gradient and the metrics of all rows are those of the slow reference. One rank."""
        loss, expected = self.serial(path)
        assert_close(gradient, expected, 2e-5 if self.true_cfg_scale > 1 else 1e-5)
        assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0
        assert metrics["num_rows"] == 18
        assert_same_projection(metrics, expected)
        beside = KL * metrics["kl"] if self.kl else 0.0
        assert metrics["policy_loss"] + beside == pytest.approx(loss, rel=1e-4, abs=1e-6)


CASES = {  # scales, clips, laws of KL and ways to reduce, in all combinations: test_properties.py, on a toy
    "batch_scale": Case(),
    "max_group_scale": Case(scale="max_group", tsp={"samples_per_tile": 1, "steps_per_tile": 3}),
    "full_kl_unsharded": Case(kl="velocity", fsdp={"reshard_after_forward": False}, tsp={"reduce": "fragment"}),
    "lora_kl": Case(is_lora=True, kl="flow_grpo", order=(("g2",), ("g1", "g0"))),
    "kl_checkpointed": Case(kl="flow_grpo", model={"recompute_blocks": "all"}),
    "guided": Case(true_cfg_scale=3.0, tsp={"samples_per_tile": 2, "steps_per_tile": 2}),
    "replicated": Case(fsdp={"fsdp_size": 1}, tsp={"reduce": "batch"}),
    "without_masks": Case(
        order=(("g0", "g1", "g2"),),
        true_cfg_scale=3.0,
        tsp={"samples_per_tile": 4, "steps_per_tile": 2},
        model={"enable_gradient_checkpointing": True},
        kernels={"attention_backend": "_native_flash"},
    ),
}
SHARED = ("max_group_scale", "kl_checkpointed", "replicated", "without_masks")
"""Cases that two ranks train; one rank trains the others."""


def optimizer_state(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Everything an update changes, flat and copied."""
    found = {f"weight {name}": value for name, value in local_weights(engine).items()}
    for number, (_, state) in enumerate(engine.optimizer.state.items()):
        for name, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"optimizer {number} {name}"] = local.clone()
    if AVERAGE in engine.copies:
        found |= {f"average {name}": value.clone() for name, value in engine.copies[AVERAGE].shards.items()}
    counters = [engine.state.num_updates, engine.state.num_skipped, engine.lr_scheduler.last_epoch]
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    found["counters"] = torch.tensor([*counters, *rates], dtype=torch.float64)
    return found
