# SPDX-License-Identifier: Apache-2.0
"""The plain loop on Stable Diffusion 3 computes what verl-digen computes, on a tiny checkpoint in fp32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_digen.algorithms.kl import kl_loss
from verl_digen.algorithms.objectives import default_config, policy_loss
from verl_digen.algorithms.sde import noise_rate, sde_step
from verl_digen.models.tiny import build_tiny

FOLDERS = (Path(__file__).resolve().parents[3] / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")

SIZES = "--dtype fp32 --size 64 --prompts 2 --group 3 --denoise-steps 6 --lora-rank 4"
BATCHES = "--sample-batch 4 --micro-batch 5"  # neither divides the batch of 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("plain_sd3") / "checkpoint")


@pytest.mark.parametrize("mode", ["cfg", "fast"])
def test_gradients_are_those_of_verl_digens_loss_with_some_ratios_clipped(checkpoint, mode):
    from plain_sd3 import Run, parse

    run: Any = Run(parse([str(checkpoint), "--mode", mode, *SIZES.split(), *BATCHES.split()]))
    for each in run.adapter:
        each.data.add_(0.01)
    run.texts = run.encode()
    path, log_probs, *_ = run.generate(range(run.mode.window or len(run.sde)), run.rows)
    window, path, log_probs = range(1, 2), path[1:3], log_probs[1:2]
    advantages, settings = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.5, 2.0]), run.mode
    old_log_probs = log_probs + settings.clip * torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0, 0.5])
    moved = [each.clone() for each in run.adapter]
    assert run.train(window, path, old_log_probs, advantages)["grad_norm"] < 1, "not clipped"

    law, sigma, sigma_next = "flow" if mode == "cfg" else "cps", *run.sigmas[1:3]
    ends = {"sigma": torch.full((6,), sigma), "sigma_next": torch.full((6,), sigma_next)}

    def scored() -> Any:
        settings = {"law": law, "noise_level": run.mode.eta, "sigma_max": run.sigmas[1]}
        return sde_step(run.velocity(path[0], 1, run.rows), path[0], **ends, **settings, next_sample=path[1])

    with torch.no_grad():  # `train` has moved the adapter
        for each, was in zip(run.adapter, moved, strict=True):
            each.copy_(was)
        with run.network.disable_adapter():
            base = scored()
    now = scored()
    config = replace(default_config("flow_grpo"), clip_range=settings.clip)
    columns = {"log_prob": now.log_prob, "old_log_prob": old_log_probs[0], "advantage": advantages}
    rate = noise_rate(law, now.std, *ends.values())
    means = {"mean": now.mean, "reference_mean": base.mean, "noise_rate": rate}
    loss = policy_loss("flow_grpo", columns, config).loss
    (loss + settings.kl_coef * kl_loss("flow_grpo", means).loss).backward()
    for exact, each in zip(run.exact, run.adapter, strict=True):
        torch.testing.assert_close(exact.grad, each.grad, rtol=1e-4, atol=1e-7)
