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

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_digen.observe.run_files import CHECKPOINT
from verl_digen.require import require, require_one_of

NAME = "export"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--format", default="diffusers", help="diffusers (default), peft, merged or comfyui")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the written weights; the base's without it, an adapter's own"
    )
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
    import verl  # noqa: F401 - before the next line, see `export`

    from verl_digen.tools.export.formats import WRITE_ERRORS

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


def export(
    run_dir: Path,
    *,
    step: int | None = None,
    policy: str = "current",
    base: str | None = None,
    format: str = "diffusers",
    dtype: str | None = None,
    output: Path | None = None,
) -> Path:
    """Export a checkpoint -> the folder that was written.

    Raises:
        ValueError: no run, no such checkpoint, policy or format, or `output` holds something.
        OSError: the folder cannot be written.
    """
    import torch
    import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names

    from verl_digen.tools.export.formats import FORMATS, model_card, require_fit
    from verl_digen.tools.export.policy import PolicyWeights
    from verl_digen.tools.export.saved_run import open_run

    if dtype is not None:
        require_one_of("--dtype", dtype, DTYPES)
    saved = open_run(run_dir, step, base)
    require_fit(saved, format)
    default = saved.folder / "exports" / f"{CHECKPOINT}{saved.step}-{policy}-{format}"
    folder = (default if output is None else output).absolute()
    require_empty(folder)
    weights = PolicyWeights(saved, policy)
    with written_whole(folder) as partial:
        FORMATS[format](saved, weights, partial, None if dtype is None else getattr(torch, DTYPES[dtype]))
        (partial / "README.md").write_text(model_card(saved, policy, format), encoding="utf-8")
    return folder


def require_empty(folder: Path) -> None:
    """Raise ValueError unless `folder` is missing or empty, and no other command is writing it."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, "--output must be a new or an empty folder", str(folder), "name another one")
    partial = partial_of(folder)
    require(
        not partial.exists(),
        f"{str(partial)!r} must not be there: another command writes it, or was killed",
        "a folder",
        "remove it, or give another --output",
    )


def partial_of(folder: Path) -> Path:
    """The folder in which the content of `folder` is collected."""
    return folder.with_name(folder.name + ".partial")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end, or removed if the body raised.

    Raises:
        ValueError: see `require_empty`.
    """
    folder = folder.absolute()
    require_empty(folder)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
