# SPDX-License-Identifier: Apache-2.0
"""verl-omni's way as one more mode, on our own engine (`digen bench --peer`).

It differs from `colocated` in what its published recipe sets: samples are generated one at a time, trained in
micro-batches of 16 samples and one timestep, with a reduction of the gradient for each, in two optimizer steps after
a log-prob pass. Every mode then trains verl-omni's window, so that all do the same work. It is no measurement of
verl-omni: its engine, offloading, and a reward that takes turns are not in it (simulated:
`verl_digen.simulate.verl_omni`).

*Invariant (tests/bench/test_peer.py):* our settings accept the mode's overrides, and the window is every mode's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_digen.bench.modes import Mode
from verl_digen.require import require
from verl_digen.simulate.verl_omni import NAME, VERL_OMNI, WINDOW

SAME_WINDOW = ("digen.window.kind=consecutive", f"digen.window.size={WINDOW}")
"""Overrides of every mode of a comparison with verl-omni's way."""


def compose_bench(recipes: Sequence[str], overrides: Sequence[str]) -> Any:
    """Compose the config that the modes share.

    Raises:
        ValueError: Hydra cannot compose it; with the first line of Hydra's message.
    """
    import verl  # noqa: F401 - loads the plugin, and with it the recipes; imports torch
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_module("verl.trainer.config", version_base=None):
        try:
            return compose("ppo_trainer", overrides=[f"recipe=[{','.join(recipes)}]", *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"the config cannot be composed: {str(error).strip().splitlines()[0]}") from error


def peer_mode(num_prompts: int) -> Mode:
    """verl-omni's way for batches of `num_prompts` prompts.

    Raises:
        ValueError: the prompts cannot be dealt evenly to its updates.
    """
    require(
        num_prompts % VERL_OMNI.num_updates == 0,
        f"data.train_batch_size must be a multiple of {VERL_OMNI.num_updates} prompts with --peer, one part for each "
        "optimizer step",
        num_prompts,
        "give another batch size",
    )
    overrides = (
        *("digen.tsp.enable=false", "digen.tsp.steps_per_tile=auto", "digen.tsp.reduce=tile"),
        f"digen.tsp.samples_per_tile={VERL_OMNI.samples_per_micro_batch}",
        "digen.loss.old_log_probs=recompute",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts // VERL_OMNI.num_updates}",
        "digen.rollout.max_batch_size=1",
    )
    return Mode(NAME, (), overrides, ())
