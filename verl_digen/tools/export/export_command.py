# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint for diffusers, peft and other tools.

    digen export outputs/run
    digen export outputs/run --step 60 --policy ema --format merged --dtype bf16 --output my_model

RUN is a run's folder, its trainer.default_local_dir. Shards of all ranks are put together on the CPU; no GPU, no Ray.
Formats: diffusers (networks, or an adapter for load_lora_weights), peft (an adapter), merged (base + adapter),
comfyui (an adapter).
See docs/checkpoints.md.

Exit code 0, or 2 if nothing could be exported; then nothing is left behind.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

NAME = "export"


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--format", default="diffusers", help="diffusers (default), peft, merged or comfyui")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32; the base's without it, an adapter's own")
    parser.add_argument("--push-to-hub", metavar="REPO", help="also upload the folder, to this repository of the hub")
    parser.add_argument("--output", type=Path, metavar="DIR", help="new or empty folder; RUN/exports/... without it")


def add_run_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments that choose a run's policy."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, help="step of the checkpoint; the newest one without it")
    parser.add_argument("--policy", default="current", help="current (default), ema, old, ...: a policy that was saved")
    parser.add_argument("--base", metavar="PATH", help="base checkpoint, if it is not where the run read it")


def run(args: Namespace) -> int:
    """Export and say where."""
    import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names

    from verl_digen.tools.export.formats import WRITE_ERRORS, export

    chosen = {name: getattr(args, name) for name in ("step", "policy", "base", "format", "dtype", "output")}
    try:
        folder = export(args.run_dir, **chosen)
    except WRITE_ERRORS as error:
        print(f"digen export: nothing was exported: {error}; make room, or name another --output", file=sys.stderr)
        return 2
    print(folder)
    if args.push_to_hub is None:
        return 0
    try:
        print(_push(folder, args.push_to_hub))
    except (OSError, ValueError) as error:  # the hub's client derives its errors from these
        print(f"digen export: {folder} is complete, but was not uploaded: {error}; see HF_TOKEN", file=sys.stderr)
        return 2
    return 0


def _push(folder: Path, repo: str) -> str:
    """Upload the folder, as one commit, into a repository that is made if it is not there; returns the address."""
    from huggingface_hub import HfApi

    api = HfApi()
    made = api.create_repo(repo, exist_ok=True)
    api.upload_folder(folder_path=folder, repo_id=made.repo_id, commit_message=f"digen export {folder.name}")
    return str(made)
