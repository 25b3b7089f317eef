# SPDX-License-Identifier: Apache-2.0
"""`digen bench` with a mode more: our engine with the settings of verl-omni's published recipe.

    python examples/research/peer.py --modes as-verl-omni,colocated+tsp,gap+tsp+tag [further words of digen bench]

It differs from `colocated` in what that recipe sets: samples are generated one at a time, trained in micro-batches of
16 samples and one timestep, with a reduction of the gradient for each, in two optimizer steps after a log-prob pass.
It is no measurement of verl-omni: its engine, offloading, and a reward that takes turns are not in it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from as_verl_omni import NAME, VERL_OMNI

from verl_digen.tools import bench
from verl_digen.tools.bench import MODES, Mode

NUM_PROMPTS = 8
"""Prompts of a batch of the quick start, the recipe of `digen bench`."""


def peer_mode() -> Mode:
    """The recipe's settings."""
    overrides = (
        *("digen.tsp.enable=false", "digen.tsp.steps_per_tile=auto", "digen.tsp.reduce=tile"),
        f"digen.tsp.samples_per_tile={VERL_OMNI.samples_per_micro_batch}",
        "digen.loss.old_log_probs=recompute",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS // VERL_OMNI.num_updates}",
        "digen.rollout.max_batch_size=1",
    )
    return Mode(NAME, (), overrides)


def main() -> int:
    MODES[NAME] = peer_mode()
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    bench.add_arguments(parser)
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
