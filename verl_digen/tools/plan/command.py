# SPDX-License-Identifier: Apache-2.0
"""Calculate before the first out-of-memory whether a run fits its devices, what it moves, and how long a step takes.

The words are those of `digen train`, and those below. Nothing is downloaded for a local folder, or for a
checkpoint that this knows.
  gpus=8              devices of the whole run (separate pools share them), in place of the pools' own keys; also
                      gpus=8xH100, gpus=2x24GB, or of two types gpus=20xH800+24xA100, which train and which generate
  gpu_mem=80          GB of each
  device=H100         their type, for the seconds; this machine's without it
  host_mem=1000       GB of host memory of a node, for a verdict about it
  mfu=0.4             share of the peak that is assumed; where one was measured for the network, that one without it
  prompt_tokens=128   length of a prompt
  reward_s=0          seconds from a sample's pixels to its rewards, for the split below

    digen plan digen_qwen_image gpus=8 gpu_mem=80
    digen plan digen_flowgrpo actor_rollout_ref.model.path=Wan-AI/Wan2.1-T2V-14B-Diffusers \\
        digen.sampling.height_px=480 digen.sampling.width_px=832 digen.sampling.num_frames=81 gpus=8 device=H100

With a type of device it also says which split of the same devices into trainer and generator is the fastest one that
fits, simulated as by `digen simulate` on the calculated seconds, and the words for it.

A config that a run would refuse before Ray starts is refused with the same message. Weights, prompts and rewards need
not be there yet, nor the packages of a replica.

Exit code 0 if it fits or the memory is not known, 1 if it does not fit, 2 if it cannot be planned.
"""

import json
from argparse import ArgumentParser, Namespace

NAME = "plan"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="WORD", help="RECIPE KEY=VALUE ..., and the words above")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: Namespace) -> int:
    import verl  # noqa: F401 - loads the plugin; before the next line, which imports parts of it

    from verl_digen.tools.plan.output import make_plan, to_json, to_text

    plan = make_plan(args.words)
    print(json.dumps(to_json(plan), indent=2) if args.json else to_text(plan))
    return 1 if plan.memory.fits is False or plan.host_fits is False else 0
