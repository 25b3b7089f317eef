# SPDX-License-Identifier: Apache-2.0
"""A run for the page: its start (words, recipes, config against the recipes, notes, versions), its warnings, its few
most important numbers, and its health."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from verl_digen.observe.health import Health
from verl_digen.observe.run_files import CHECKPOINT, RUN_FILE, START, WARNINGS, json_in, read_lines
from verl_digen.report.curves import VALIDATION, rounded

MAX_WARNINGS = 200
MAX_VALUE_CHARS = 300


def read_start(run_dir: Path) -> dict[str, Any]:
    """Read what the run left of its newest start: `words`, `recipes`, `notes`, `versions` and `at_s` as in
    `start.json`; `changes`: (key, value of the recipes, value of the run) as texts; `config`: (key, value) of every
    leaf, as texts. What is not known is empty; `at_s` and `changes` are None."""
    path = run_dir / START
    known = ("words", "recipes", "notes", "versions", "at_s")
    found = json_in(path, *known, "changes", "config") if path.is_file() else _of_checkpoint(run_dir)
    changes = found["changes"]
    return {
        **{name: found[name] for name in known},
        "changes": None if changes is None else [[key, _text(old), _text(new)] for key, old, new in changes],
        "config": [[key, _text(value)] for key, value in leaves("", found["config"]) if key],
    }


def _of_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Config and versions of the newest checkpoint, for a run without `start.json`, which a user's program started."""
    written = sorted(run_dir.glob(f"{CHECKPOINT}*/{RUN_FILE}"), key=lambda path: path.stat().st_mtime)
    known = json_in(written[-1], "config", "versions") if written else {"config": {}, "versions": {}}
    return {**known, "words": [], "recipes": [], "notes": [], "changes": None, "at_s": None}


def value_of(start: dict[str, Any], key: str) -> str | None:
    """Text of a value of the config; None if it is not known or null."""
    found = dict(map(tuple, start["config"])).get(key)
    return None if found in (None, "null") else found


def warnings_of(run_dir: Path) -> dict[str, Any]:
    """The newest warnings of the driver, equal texts once; `num_left_out`: further texts."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(run_dir / WARNINGS):
        entry = found.setdefault(line["text"], {"count": 0, "first_step": line["step"]})
        entry |= {"level": line["level"], "last_step": line["step"], "count": entry["count"] + 1}
    shown = [{"text": text, **entry} for text, entry in found.items()]
    return {"shown": shown[-MAX_WARNINGS:], "num_left_out": max(0, len(shown) - MAX_WARNINGS)}


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below; an empty mapping is a value."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, item in value.items():
        yield from leaves(f"{prefix}.{name}" if prefix else str(name), item)


def _text(value: Any) -> str:
    """The value as one would type it, cut to `MAX_VALUE_CHARS`."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def planned_steps(start: dict[str, Any]) -> int | None:
    """Steps that the newest start was asked for; None if it names none."""
    planned = value_of(start, "trainer.total_training_steps")
    return int(planned) if planned is not None and planned.isdecimal() else None


RECENT = 20
"""Newest steps whose median is shown as the speed."""
PAUSE_S = 1800.0
"""Time between two lines of metrics, besides the step's own, from which on the run is taken to have stood still."""
MEMORY = "actor/perf/max_memory_allocated_gb"
FACTS = (
    ("model", "actor_rollout_ref.model.path"),
    ("objective", "digen.loss.name"),
    ("prompts per step", "data.train_batch_size"),
    ("samples per prompt", "actor_rollout_ref.rollout.n"),
    ("LoRA rank", "actor_rollout_ref.model.lora_rank"),
)


def heading(run_dir: Path, start: dict[str, Any]) -> dict[str, Any]:
    """Name of the run, and (word, value) of what it trains."""
    facts = [["recipe", ", ".join(start["recipes"])]] if start["recipes"] else []
    facts += [[word, value] for word, key in FACTS if (value := value_of(start, key)) not in (None, "0")]
    return {"name": run_dir.resolve().name, "folder": str(run_dir.resolve()), "facts": facts}


def health(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Verdicts of the rules of health, as lines of the panel."""
    judged = Health()
    for row in rows:
        judged.observe(row)
    return [
        {
            **{"name": verdict.rule.name, "metric": verdict.rule.metric, "level": verdict.level},
            **{"value": rounded(verdict.value), "text": verdict.text},
            **{"advice": f"{verdict.rule.meaning} {verdict.rule.remedy}", "page": verdict.rule.page},
        }
        for verdict in judged.verdicts()
    ]


def tiles(
    rows: Sequence[Mapping[str, float]], start: dict[str, Any], warnings: dict[str, Any], state: str
) -> list[dict[str, str]]:
    """Tiles of `label`, `value` and `detail`; those that have a value. `state` is the run's, see `report.runs`."""
    trained = [row for row in rows if "reward/mean" in row]
    shown = [*_validation(rows), *_training(trained, start), *_time(rows, start, state), *_speed(trained)]
    count = len(warnings["shown"]) + warnings["num_left_out"]
    return [*shown, _tile("Warnings", str(count), "see below" if count else "none from the driver")]


def _tile(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _validation(rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    validated = [(int(row["step"]), row[VALIDATION]) for row in rows if VALIDATION in row]
    if not validated:
        return []
    (first_step, first), (last_step, last) = validated[0], validated[-1]
    best_step, best = max(validated, key=lambda entry: entry[1])
    detail = f"after step {last_step}"
    if first_step != last_step:
        change = f"{last - first:+.3g} since step {first_step} ({_number(first)})"
        detail = f"{change} · best {_number(best)} after step {best_step}"
    return [_tile("Validation reward", _number(last), detail)]


def _training(trained: Sequence[Mapping[str, float]], start: dict[str, Any]) -> list[dict[str, str]]:
    if not trained:
        return []
    last = trained[-1]
    total = value_of(start, "trainer.total_training_steps")
    return [
        _tile("Training reward", _number(last["reward/mean"]), f"± {last['reward/std']:.3g} over its samples"),
        _tile("Steps", str(int(last["step"])), f"of {total}" if total else "so far"),
    ]


def _time(rows: Sequence[Mapping[str, float]], start: dict[str, Any], state: str) -> list[dict[str, str]]:
    """Time from the start to the end, or to what is left, and device-hours; without pauses between two starts; a step
    lasts as long as it says itself where the clock was set back."""
    timed = [row for row in rows if "at_s" in row and "perf/step_s" in row]
    if not timed:
        return []
    first, last = timed[0], timed[-1]
    began_s = first["at_s"] - first["perf/step_s"]
    if start["at_s"] is not None:  # of the newest start
        began_s = min(began_s, start["at_s"])
    gaps = [median((s := row["perf/step_s"], row["at_s"] - old["at_s"], s + PAUSE_S)) for old, row in pairwise(timed)]
    spent_s = first["at_s"] - began_s + sum(gaps)
    pace_s = median([*gaps[-RECENT:], last["perf/step_s"]])
    left = (planned_steps(start) or 0) - last["step"]
    if left > 0 and state in ("starting", "running"):
        ends = f"about {duration(left * pace_s)} left"
    else:
        ends = f"{state if left > 0 else 'ended'} {clock(last['at_s'])}"
    count = round(last["perf/images_per_s"] / last["perf/images_per_s_per_device"])
    return [
        _tile("Time", duration(spent_s), f"since {clock(began_s)} · {ends}"),
        _tile("Device-hours", f"{count * spent_s / 3600:.3g}", f"on {count} device{'s' * (count > 1)}"),
    ]


def clock(at_s: float) -> str:
    """A moment for people."""
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def duration(seconds: float) -> str:
    """`45s`, `2m05s`, `3h07m`."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def _speed(trained: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    recent = trained[-RECENT:]
    if not recent:
        return []
    per_s, step_s = (median(row[name] for row in recent) for name in ("perf/images_per_s", "perf/step_s"))
    shown = [_tile("Samples per second", _number(per_s), f"{_number(step_s)} s a step, newest {len(recent)}")]
    idle = {
        name.removeprefix("perf/bubble_fraction/"): median(row[name] for row in recent if name in row)
        for name in recent[-1]
        if name.startswith("perf/bubble_fraction/")
    }
    if peaks := [row[MEMORY] for row in trained if MEMORY in row]:
        shown.append(_tile("Memory of a trainer rank", f"{max(peaks):.3g} GB", "peak so far, on the fullest device"))
    if idle:
        shares = " · ".join(f"{pool} {share:.0%}" for pool, share in idle.items())
        shown.append(_tile("Idle", f"{max(idle.values()):.0%}", shares))
    return shown


def _number(value: float) -> str:
    """Four significant digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
