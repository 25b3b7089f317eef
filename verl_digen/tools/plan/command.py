# SPDX-License-Identifier: Apache-2.0
"""Calculate before the first out-of-memory whether a run fits its devices, what it moves, and how long a step takes.

The words are overrides as verl's main takes them, and those below. Nothing is downloaded for a local folder, or for a
checkpoint that this knows.
  gpus=8              devices of the whole run (separate pools share them), in place of the pools' own keys; also
                      gpus=8xH100, gpus=2x24GB, or of two types gpus=20xH800+24xA100, which train and which generate
  gpu_mem=80          GB of each
  device=H100         their type, for the seconds; this machine's without it
  host_mem=1000       GB of host memory of a node, for a verdict about it
  mfu=0.4             share of the peak that is assumed; where one was measured for the network, that one without it
  prompt_tokens=128   length of a prompt
  reward_s=0          seconds from a sample's pixels to its rewards, for the split below

    digen plan recipe=digen_qwen_image gpus=8 gpu_mem=80
    digen plan recipe=digen_flowgrpo actor_rollout_ref.model.path=Wan-AI/Wan2.1-T2V-14B-Diffusers \\
        digen.sampling.height_px=480 digen.sampling.width_px=832 digen.sampling.num_frames=81 gpus=8 device=H100

With a type of device it also says which split of the same devices into trainer and generator is the fastest one that
fits, simulated as by `digen simulate` on the calculated seconds, and the words for it.

A config that a run would refuse before Ray starts is refused with the same message. Weights, prompts and rewards need
not be there yet, nor the packages of a replica.

Exit code 0 if it fits or the memory is not known, 1 if it does not fit, 2 if it cannot be planned.
"""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_digen.tools.plan.output import Plan, to_json, to_text

if TYPE_CHECKING:
    from verl_digen.tools.plan.compose import Words
    from verl_digen.tools.plan.run import Run
    from verl_digen.tools.plan.split import SplitPlan

NAME = "plan"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="KEY=VALUE", help="overrides of verl's main, and the words above")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: Namespace) -> int:
    plan = make_plan(args.words)
    print(json.dumps(to_json(plan), indent=2) if args.json else to_text(plan))
    return 1 if plan.memory.fits is False or plan.host_fits is False else 0


def make_plan(words: Sequence[str]) -> Plan:
    """Plan the run that these words would start.

    Raises:
        ValueError: a config, checkpoint or setting that cannot be planned.
    """
    from verl_digen.models.published import checkpoint_folder
    from verl_digen.preflight.rules import check_plannable_model
    from verl_digen.tools.plan.compose import device_of, mfu_of, split_words
    from verl_digen.tools.plan.memory import plan_memory
    from verl_digen.tools.plan.remedies import find_remedies
    from verl_digen.tools.plan.run import read_run
    from verl_digen.tools.plan.split import plan_split, plan_time

    own, overrides = split_words(words)

    def read(*more: str) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl warns about every engine whose library is missing
            config = check_words([*overrides, *more], own)
            with checkpoint_folder(config.actor_rollout_ref.model.path) as folder:
                check_plannable_model(config, folder)
            return read_run(config, own.prompt_tokens)

    planned = read()
    device, device_bytes = device_of(own)
    memory = plan_memory(planned, device_bytes)
    types = own.types or (None if device is None else (device, device))
    mfu = own.mfu or mfu_of(planned.measured.title, planned.measured.counts.num_weights)
    split = None if types is None else plan_split(planned, types, device_bytes, mfu, own.reward_s)
    return Plan(
        run=planned,
        memory=memory,
        time=plan_time(planned, device, mfu, memory.recomputed_share, types and types[1]),
        device=device,
        device_bytes=device_bytes,
        mfu=mfu,
        words=own,
        remedies=[] if device_bytes is None else find_remedies(planned, device_bytes, read),
        split=split,
        split_words=split_words_of(split, overrides, own) if split is not None and split.is_proposed else "",
    )


def check_words(overrides: Sequence[str], own: Words) -> Any:
    """Compose the config of these overrides and check it, as a run would before Ray starts.

    Raises:
        ValueError: the messages that a run would be refused with.
    """
    from verl_digen.preflight.rules import check_plannable
    from verl_digen.tools.plan.compose import compose_run, platform_of

    config = compose_run(overrides, own)
    with platform_of(own):
        check_plannable(config)
    return config


def split_words_of(split: SplitPlan, overrides: Sequence[str], own: Words) -> str:
    """Words to type for the proposed split, in place of `gpus`; or why a run would refuse them."""
    from verl_digen.tools.simulate.splits import POOL_KEYS

    words = list(split.overrides)
    kept = [word for word in overrides if word.partition("=")[0].lstrip("+") not in POOL_KEYS]
    if split.given is None:
        recipes = [word for word in kept if word.startswith("recipe=")]
        kept = [word for word in kept if word not in recipes]
        named = [recipes[-1].removeprefix("recipe=").strip("[]").replace(",", "+")] if recipes else []
        words.insert(0, f"recipe={'+'.join([*named, 'disaggregated'])}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_words([*kept, *words], replace(own, gpus=None, pools=None, device=own.types and own.types[0]))
    except ValueError as error:
        return f"which a run would refuse as it is: {error}"
    return " ".join(words)
