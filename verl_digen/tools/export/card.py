# SPDX-License-Identifier: Apache-2.0
"""Model card of an export: base model, training, rewards, validations, versions. Facts of the run's files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from omegaconf import OmegaConf

from verl_digen.models.locate import HUB_ID
from verl_digen.observe.run_files import METRICS, read_lines
from verl_digen.report.curves import thinned
from verl_digen.report.start import read_start
from verl_digen.tools.export.saved_run import SavedRun

MAX_ROWS = 20
"""Validations in the table; of more, evenly spaced ones, the first and the last among them."""


def model_card(run: SavedRun, policy: str, form: str) -> str:
    """Text of README.md for the export of `policy` in format `form`."""
    settings, model = run.digen, run.model_config
    trained = f"LoRA, rank {model.lora_rank}, alpha {model.lora_alpha}" if run.is_lora else "all weights"
    facts = {
        "base model": f"`{model.path}`",
        "pipeline": run.model.pipeline,
        "trained": trained,
        "objective": f"`{settings.loss_name}`",
        "checkpoint": f"step {run.step}, policy `{policy}`, format `{form}`",
    }
    parts = [f"---\n{_metadata(run)}\n---", f"# {run.folder.absolute().name}", "Trained with verl-digen."]
    parts.append(_table(("", ""), facts.items()))
    parts.append("## Rewards\n\n" + _table(("reward", "weight"), _rewards(run)))
    if rows := list(validations(run.folder / METRICS, run.step)):
        parts.append("## Validation\n\nMean reward over the validation prompts.\n\n" + _table(("step", "reward"), rows))
    if words := read_start(run.folder)["words"]:
        parts.append("## Command line\n\n" + "\n".join(f"    {word}" for word in words))
    parts.append("## Versions\n\n" + _table(("package", "version"), run.versions.items()))
    return "\n\n".join(parts) + "\n"


def _metadata(run: SavedRun) -> str:
    """The card's front matter; the licence is that which the base checkpoint's own card states."""
    card = run.model.path / "README.md"
    known: Mapping[str, Any] = (metadata_load(card) or {}) if card.is_file() else {}
    path = run.model_config.path
    data = ModelCardData(
        base_model=path if HUB_ID.fullmatch(path) and not Path(path).exists() else None,
        license=known.get("license"),
        license_name=known.get("license_name"),
        license_link=known.get("license_link"),
        library_name="diffusers",
        tags=["verl-digen", "reinforcement-learning", *(["lora"] if run.is_lora else [])],
    )
    return data.to_yaml()


def _rewards(run: SavedRun) -> Iterator[tuple[str, str]]:
    custom = OmegaConf.select(run.config, "reward.custom_reward_function.path")
    for name, weight in run.digen.reward.weights(has_custom=custom is not None).items():
        yield f"`{name}`", f"{weight:g}"


def validations(metrics: Path, step: int) -> Iterator[tuple[int, str]]:
    """(step, mean reward) of validations up to `step` in a run's metrics.jsonl; at most `MAX_ROWS`."""
    rows = [row for row in read_lines(metrics) if "val/reward" in row and row["step"] <= step]
    found = {row["step"]: row["val/reward"] for row in rows}
    for at in thinned(sorted(found), MAX_ROWS):
        yield at, f"{found[at]:.4f}"


def _table(head: tuple[str, str], rows: Any) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)
