# SPDX-License-Identifier: Apache-2.0
"""`Teacher`: one frozen policy that is distilled into the one that trains, an entry of `digen.loss.teachers`.

teachers: {ocr: {path: /runs/ocr/lora_adapter, data_sources: [ocr]}, geneval: {path: ..., data_sources: [geneval]}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from verl_digen.require import require, suggestion

KEY = "digen.loss.teachers"


@dataclass(frozen=True)
class Teacher:
    """One teacher, as configured."""

    path: str
    """Folder on every node of the trainer, or hdfs://: a transformer in the diffusers format, a pipeline with one, or a
    LoRA adapter for the run's checkpoint, of any rank and layers, in peft's or diffusers' format."""
    data_sources: tuple[str, ...] | None = None
    """`data_source` of the prompts whose samples it teaches; None: all."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of its velocity; None: that of the samples. 4.5, e.g., teaches a student without
    guidance what the teacher draws with it."""

    def teaches(self, data_source: str) -> bool:
        """True if it teaches samples of prompts of this source."""
        return self.data_sources is None or data_source in self.data_sources


def read_teachers(given: Mapping[str, Any]) -> dict[str, Teacher]:
    """`digen.loss.teachers` as plain values -> teachers by name.

    Raises:
        ValueError: a key is unknown or missing, a value breaks a rule, or two teachers have one source.
    """
    teachers = {str(name): _read(f"{KEY}.{name}", entry) for name, entry in given.items()}
    claimed: dict[str, str] = {}
    for name, teacher in teachers.items():
        require(
            teacher.data_sources is not None or len(teachers) == 1,
            f"{KEY}.{name}.data_sources must name the data_source of its prompts where there are several teachers",
            teacher.data_sources,
            "set it for each of them",
        )
        for source in teacher.data_sources or ():
            require(
                source not in claimed,
                f"{KEY}.{name}.data_sources must name sources that no other teacher has, but {claimed.get(source)} has",
                source,
                "take it out of one of them",
            )
            claimed[source] = name
    return teachers


def teacher_forwards(teachers: Mapping[str, Teacher], true_cfg_scale: float) -> float:
    """Forwards of a row by its teacher, the mean over the teachers; 0.0 without any. The unit is one by the student.

    Args:
        true_cfg_scale: guidance of the student; the unit has two branches with it.
    """
    scales = [true_cfg_scale if one.true_cfg_scale is None else one.true_cfg_scale for one in teachers.values()]
    branches = [1 if scale == 1.0 else 2 for scale in (*scales, true_cfg_scale)]
    return sum(branches[:-1]) / len(scales) / branches[-1] if scales else 0.0


def _read(key: str, entry: Any) -> Teacher:
    known = [field.name for field in fields(Teacher)]
    require(isinstance(entry, Mapping), f"{key} must be a mapping with a path", entry, f"write {key}.path=FOLDER")
    for name in entry:
        require(
            name in known,
            f"{key}.{name} must be a key of a teacher",
            entry[name],
            f"{suggestion(str(name), known)}its keys are {', '.join(known)}",
        )
    path = entry.get("path")
    require(isinstance(path, str) and path != "", f"{key}.path must be a folder", path, f"set {key}.path=FOLDER")
    assert isinstance(path, str)
    sources = entry.get("data_sources")
    require(
        sources is None or (isinstance(sources, list | tuple) and len(sources) > 0 and all(map(_is_name, sources))),
        f"{key}.data_sources must be null or a list of names",
        sources,
        "null teaches all prompts",
    )
    scale = entry.get("true_cfg_scale")
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    require(
        scale is None or (is_number and 1 <= scale < math.inf),
        f"{key}.true_cfg_scale must be null or a number >= 1",
        scale,
        "1 is no guidance, null takes that of the samples",
    )
    return Teacher(path, None if sources is None else tuple(sources), None if scale is None else float(scale))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
