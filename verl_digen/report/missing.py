# SPDX-License-Identifier: Apache-2.0
"""Sentences about what a page does not show: a part that has nothing yet, and what was thinned out. Pure."""

from __future__ import annotations

from typing import Any


def sentences(data: dict[str, Any]) -> dict[str, Any]:
    """Part of the page -> the sentence in its place, for parts without content; `left_out`: sentences."""
    names = data["curves"]["columns"]
    has_steps, has_validations = "reward/mean" in names, "val/reward" in names
    no_step = "The run has not finished a step yet."
    empty: dict[str, str] = {}
    if not has_steps and not has_validations:
        empty["reward"] = no_step
    if not has_steps:
        empty |= {"health": no_step, "speed": no_step, "metrics": no_step}
    if not any(name.startswith(("reward/", "val/reward_")) for name in names):
        empty["parts"] = no_step
    if not data["distributions"]["steps"]:
        empty["distributions"] = (
            "No step has recorded its rewards yet: every digen.logged_groups_every steps does, "
            "unless digen.num_logged_groups=0."
        )
    if not data["validations"]["steps"]:
        empty["validations"] = (
            "There is no validation with pictures yet: trainer.test_freq and trainer.val_before_train say when there "
            "is, digen.num_logged_images how many prompts it shows."
        )
    if not data["groups"]["steps"]:
        empty["groups"] = (
            "No training group has been shown yet: every digen.logged_groups_every steps shows "
            "digen.num_logged_groups groups."
        )
    if not data["timelines"]["steps"]:
        is_there = data["timelines"]["is_there"]
        empty["timeline"] = (
            "The timeline holds no complete step yet." if is_there else "This run has recorded no timeline."
        )
    start = data["start"]
    if start["changes"] is None:
        empty["changes"] = (
            "The run's folder has no start.json, so its config cannot be compared with the recipe: runs started by "
            "verl's main write it."
        )
    elif not start["changes"]:
        empty["changes"] = "The run is the recipe, unchanged."
    if not start["config"]:
        empty["config"] = "The run's folder holds no config."
    if not start["versions"]:
        empty["versions"] = "The run's folder does not say which versions it had."
    if not data["warnings"]["shown"]:
        empty["warnings"] = "The driver has given no warning. Those of workers are on the console alone."
    return {"empty": empty, "left_out": _left_out(data)}


def _left_out(data: dict[str, Any]) -> list[str]:
    found = []
    num_rows, kept = data["curves"]["num_rows"], len(data["curves"]["columns"].get("step", ()))
    if kept < num_rows:
        found.append(f"Curves show {kept} of {num_rows} steps, evenly spread; metrics.jsonl has all.")
    for name, what in (("distributions", "distributions"), ("validations", "validation pictures")):
        if left_out := data[name]["num_left_out"]:
            found.append(f"The {what} of {left_out} more steps are not shown, to bound the file.")
    if left_out := data["groups"]["num_left_out"]:
        found.append(f"Training groups of {left_out} more steps are not shown; images/ of the run has them.")
    if left_out := data["validations"]["num_prompts_left_out"]:
        found.append(f"{left_out} more validation prompts are not shown; images/ of the run has them.")
    if not data["timelines"]["is_whole"]:
        found.append("The timeline is long: only its newest part was read.")
    if left_out := data["warnings"]["num_left_out"]:
        found.append(f"{left_out} earlier warnings are not shown; warnings.jsonl has them.")
    return found
