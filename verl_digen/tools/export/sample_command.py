# SPDX-License-Identifier: Apache-2.0
"""Draw pictures or videos with a policy of a checkpoint.

    digen sample outputs/run --prompt 'a sign that says "CAT"' --num 4
    digen sample outputs/run --prompts val.jsonl --step 60 --policy ema --output after_60

RUN is a run's folder, its trainer.default_local_dir. Settings are its validation's: no noise after the first,
digen.sampling.val_num_steps, val_true_cfg_scale, val_solver; --steps, --size and --seed replace them. With the run's
validation file the pictures are its validation's. On the accelerator of this machine, else on the CPU.

Exit code 0, or 2 if nothing could be drawn; then nothing is left behind.
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from verl_digen.observe.run_files import CHECKPOINT
from verl_digen.tools.export.export_command import add_run_arguments

NAME = "sample"


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help="prompt file, as data.val_files")
    parser.add_argument("--num", type=_positive, default=1, help="samples per prompt (1)")
    parser.add_argument("--seed", type=int, help="seed of the noise; the run's digen.seed without it")
    parser.add_argument("--steps", type=int, help="denoising steps, in place of digen.sampling.val_num_steps")
    parser.add_argument("--size", type=_size, metavar="HxW", help="pixels, in place of the run's")
    parser.add_argument("--output", type=Path, metavar="DIR", help="new or empty folder; RUN/samples/... without it")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be an integer >= 1, got {text!r}; e.g. 4")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise ArgumentTypeError(f"must be HEIGHTxWIDTH in pixels, got {text!r}; e.g. 512x768")
    return int(found[1]), int(found[2])


def run(args: Namespace) -> int:
    """Draw and say where."""
    import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names

    from verl_digen.tools.export.formats import require_empty, written_whole
    from verl_digen.tools.export.pictures import Painter, changed, rows_of, save_pictures
    from verl_digen.tools.export.saved_run import open_run

    saved = open_run(args.run_dir, args.step, args.base)
    rows = rows_of(saved, args.prompt, args.prompts)
    digen = changed(saved.digen, seed=args.seed, num_steps=args.steps, size_px=args.size)
    name = f"{CHECKPOINT}{saved.step}-{args.policy}"
    folder = (saved.folder / "samples" / name if args.output is None else args.output).absolute()
    require_empty(folder)
    painter = Painter(saved, args.policy, digen)
    with written_whole(folder) as partial:
        save_pictures(painter, rows, args.num, partial, f"{saved.folder.name}, step {saved.step}, {args.policy}")
    print(folder)
    return 0
