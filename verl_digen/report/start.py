# SPDX-License-Identifier: Apache-2.0
"""The start of a run for the page: words, recipes, config against the recipes, notes, versions, warnings.

Read from `start.json`; of a run without it, which a program of the user's started, from the newest checkpoint's
`run.json` (config and versions).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_digen.observe.run_files import CHECKPOINT, START, WARNINGS, read_lines

CHECKPOINT_FILE = f"{CHECKPOINT}*/run.json"
MAX_WARNINGS = 200
MAX_VALUE_CHARS = 300


def read_start(run_dir: Path) -> dict[str, Any]:
    """Read what the run left of its newest start.

    Returns:
        words, recipes, notes, versions: as in `start.json`, empty if not known. at_s: unix time, None if not known.
        changes: (key, value of the recipes, value of the run) as texts, None if not known. config: (key, value) of
        every leaf, as texts.
    """
    path = run_dir / START
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else _of_checkpoint(run_dir)
    changes = found["changes"]
    return {
        **{name: found[name] for name in ("words", "recipes", "notes", "versions", "at_s")},
        "changes": None if changes is None else [[key, _text(old), _text(new)] for key, old, new in changes],
        "config": [[key, _text(value)] for key, value in leaves("", found["config"]) if key],
    }


def _of_checkpoint(run_dir: Path) -> dict[str, Any]:
    """Config and versions of the newest checkpoint, if there is one."""
    written = sorted(run_dir.glob(CHECKPOINT_FILE), key=lambda path: path.stat().st_mtime)
    known = json.loads(written[-1].read_text(encoding="utf-8")) if written else {"config": {}, "versions": {}}
    return {**known, "words": [], "recipes": [], "notes": [], "changes": None, "at_s": None}


def value_of(start: dict[str, Any], key: str) -> str | None:
    """Text of a value of the config; None if it is not known or null."""
    found = dict(map(tuple, start["config"])).get(key)
    return None if found in (None, "null") else found


def warnings_of(run_dir: Path) -> dict[str, Any]:
    """The newest warnings of the driver, equal texts once.

    Returns:
        shown: text, level, count, first_step and last_step of each. num_left_out: further texts.
    """
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
