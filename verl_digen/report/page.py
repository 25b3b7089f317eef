# SPDX-License-Identifier: Apache-2.0
"""The page: one dict with all that it shows, as JSON in one HTML file together with style, script and plotly.

Nothing is fetched: the page's content security policy forbids it. The script writes texts of a run as text, never as
HTML.

*Invariants (tests/report):* the file is below `MAX_BYTES` however long the run is; no text of a run becomes markup.
"""

import json
import pkgutil
import re
import time
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_digen.observe.run_files import METRICS, REPORT, replace_text
from verl_digen.report.curves import columns, distributions, read_rows
from verl_digen.report.pictures import groups, validations
from verl_digen.report.runs import require_run, state_of
from verl_digen.report.summary import clock, heading, health, planned_steps, read_start, tiles, warnings_of
from verl_digen.report.timelines import timelines


def sentences(data: dict[str, Any]) -> dict[str, Any]:
    """Part of the page -> the sentence in its place, for parts without content; `left_out`: sentences."""
    names, start, shown = data["curves"]["columns"], data["start"], data["timelines"]
    has_steps, no_step = "reward/mean" in names, "The run has not finished a step yet."
    parts = {
        "reward": (has_steps or "val/reward" in names, no_step),
        **dict.fromkeys(("health", "speed", "metrics"), (has_steps, no_step)),
        "parts": (any(name.startswith(("reward/", "val/reward_")) for name in names), no_step),
        "distributions": (
            data["distributions"]["steps"],
            "No step has recorded its rewards yet: every digen.logged_groups_every steps does, unless "
            "digen.num_logged_groups=0.",
        ),
        "validations": (
            data["validations"]["steps"],
            "There is no validation with pictures yet: trainer.test_freq and trainer.val_before_train say when there "
            "is, digen.num_logged_images how many prompts it shows.",
        ),
        "groups": (
            data["groups"]["steps"],
            "No training group has been shown yet: every digen.logged_groups_every steps shows "
            "digen.num_logged_groups groups.",
        ),
        "timeline": (
            shown["steps"],
            "The timeline holds no complete step yet." if shown["is_there"] else "This run has recorded no timeline.",
        ),
        "changes": (
            start["changes"],
            "The run's folder has no start.json, so its config cannot be compared with the recipe: runs started by "
            "verl's main write it."
            if start["changes"] is None
            else "The run is the recipe, unchanged.",
        ),
        "config": (start["config"], "The run's folder holds no config."),
        "versions": (start["versions"], "The run's folder does not say which versions it had."),
        "warnings": (
            data["warnings"]["shown"],
            "The driver has given no warning. Those of workers are on the console alone.",
        ),
    }
    empty = {part: sentence for part, (content, sentence) in parts.items() if not content}
    return {"empty": empty, "left_out": _left_out(data)}


def _left_out(data: dict[str, Any]) -> list[str]:
    num_rows, kept = data["curves"]["num_rows"], len(data["curves"]["columns"].get("step", ()))
    validated, trained = data["validations"], data["groups"]
    told = (
        (num_rows - kept, f"Curves show {kept} of {num_rows} steps, evenly spread; metrics.jsonl has all."),
        (data["distributions"]["num_left_out"], "The distributions of {} more steps are not shown, to bound the file."),
        (validated["num_left_out"], "The validation pictures of {} more steps are not shown, to bound the file."),
        (trained["num_left_out"], "Training groups of {} more steps are not shown; images/ of the run has them."),
        (validated["num_prompts_left_out"], "{} more validation prompts are not shown; images/ of the run has them."),
        (not data["timelines"]["is_whole"], "The timeline is long: only its newest part was read."),
        (data["warnings"]["num_left_out"], "{} earlier warnings are not shown; warnings.jsonl has them."),
    )
    return [text.format(number) for number, text in told if number]


MAX_BYTES = 10_000_000
PLOTLY = "package_data/plotly.min.js"


def write_report(run_dir: Path, path: Path) -> None:
    """Write the report of a run's folder. ValueError if it is none, or broken; OSError if `path` cannot be written."""
    replace_text(path, render(collect(run_dir)))


def refresh_report(run_dir: Path) -> float:
    """Write the report into the run's folder -> the seconds that it took."""
    began_s = time.monotonic()
    write_report(run_dir, run_dir / REPORT)
    return time.monotonic() - began_s


def collect(run_dir: Path) -> dict[str, Any]:
    """All that the page shows. Raises ValueError: `run_dir` is no run's, or a file in it is broken."""
    require_run(run_dir)
    rows = read_rows(run_dir / METRICS)
    last_step = int(rows[-1]["step"]) if rows else 0
    start = read_start(run_dir)
    warnings = warnings_of(run_dir)
    found = {
        **written_now(),
        "heading": heading(run_dir, start),
        "tiles": tiles(rows, start, warnings, state_of(run_dir, last_step, planned_steps(start))[0]),
        "health": health(rows),
        "curves": {"num_rows": len(rows), "columns": columns(rows)},
        "distributions": distributions(run_dir, last_step),
        "validations": validations(run_dir, last_step),
        "groups": groups(run_dir, last_step),
        "timelines": timelines(run_dir),
        "start": start,
        "warnings": warnings,
    }
    return {**found, "missing": sentences(found)}


def written_now() -> dict[str, str]:
    """When a page was written, and by which version."""
    return {"written": clock(time.time()), "version": version("verl-digen")}


def render(data: dict[str, Any], view: str = "report", *, is_live: bool = False) -> str:
    """The HTML file that shows `data`, drawn by the function `view` of the page's script: report, comparison or list.
    `is_live`: `digen watch` serves the page, and plotly and what is new are fetched from there."""
    scripts = ["page.js", *(["runs.js"] if view != "report" else []), *(["live.js"] if is_live else [])]
    parts = {
        "title": escape(data["heading"]["name"]),
        "own": " 'self'; connect-src 'self'" if is_live else "",
        "style": _asset("page.css"),
        "plotly": '<script src="plotly.js"></script>' if is_live else f"<script>{plotly()}</script>",
        "data": json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "script": "\n".join([*map(_asset, scripts), f"draw({view});{' live();' * is_live}"]),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def plotly() -> str:
    """The JavaScript that draws plots."""
    found = pkgutil.get_data("plotly", PLOTLY)
    assert found is not None
    return found.decode()


def _asset(name: str) -> str:
    content = pkgutil.get_data("verl_digen.report", name)
    assert content is not None
    return content.decode()
