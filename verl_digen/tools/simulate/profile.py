# SPDX-License-Identifier: Apache-2.0
"""A profile: durations of the parts of a run for one model on one device, and the source of each number, in a JSON
file.

A `source` begins with `measured:` (by `digen simulate --run`, or docs/gpu_results.md), `published:` (who says so),
`derived:` (the formula, in the names of the file's own `inputs`) or `chosen:` (a setting). Of the shipped profiles
`sd3.5-medium` rests on a measured step, the others on none.
"""

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from verl_digen.hardware.devices import PEAK_TFLOPS
from verl_digen.require import In, check_fields, refusing, require, require_one_of, suggestion

SHIPPED: Any = files("verl_digen") / "profiles"
"""Folder of the shipped profiles."""
SOURCES = ("measured:", "published:", "derived:", "chosen:")
"""Allowed beginnings of a number's source."""
NEVER = 10**9
"""`min_gathering_devices` where an assist gathers the weights at every step, with any number of devices."""
Count = Annotated[int, In("[1, inf]"), "give a whole number, measured or derived"]
Seconds = Annotated[float, In("[0, inf)"), "give the measured or derived number"]


@dataclass(frozen=True)
class Numbers:
    """Numbers of a profile. Seconds are for one device of the profile's type, working alone."""

    num_prompts: Count
    """P, prompts of a batch."""
    group_size: Count
    """G, samples of a prompt."""
    num_steps: Count
    """T, denoise steps of a sample."""
    num_trained_steps: Count
    """K, rows of a sample."""
    max_chunk_size: Count
    """Samples a slot denoises at once."""
    rows_per_tile: Count
    """Rows of one forward and backward with time-step parallelism."""
    min_trainer_devices: Count
    """Minimum number of devices that hold the training state."""
    min_gathering_devices: Count
    """Minimum number of training devices each of which can hold all weights, too, while it assists."""
    step_s: Annotated[float, In("(0, inf)"), "give the measured or derived number"]
    """One denoise step of one sample, guidance included."""
    decode_s: Seconds
    """Decoding the latents of one sample to pixels."""
    row_s: Seconds
    """Forward and backward of one row."""
    gather_s: Seconds
    """One all-gather of the sharded weights by the trainer's ranks, in the limit of many ranks."""
    score_s: Seconds
    """Scoring a chunk's pixels; overlaps with everything."""
    commit_s: Seconds
    """Optimizer step and publication of the weights."""
    switch_s: Seconds
    """Colocated: one switch of a device from generating to training and back."""


@dataclass(frozen=True)
class Profile:
    """Profile of one model on one type of device."""

    name: str
    model: str
    setting: str
    """Description of the training setting, in words."""
    device: str
    """Type of device that the seconds are for."""
    numbers: Numbers

    def changed(self, **numbers: float) -> "Profile":
        """The profile with other numbers."""
        return replace(self, numbers=replace(self.numbers, **numbers))


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.name.removesuffix(".json") for path in SHIPPED.iterdir() if path.name.endswith(".json"))


def load_profile(name: str) -> Profile:
    """Load the shipped profile `name`, or the file at that path. ValueError if there is none, or it is invalid."""
    if name in profile_names():
        return parse_profile(name, SHIPPED.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    path = Path(name)
    rule = "--profile must be a file or one of the shipped profiles"
    require(path.is_file(), rule, name, f"{suggestion(name, profile_names())}shipped are {', '.join(profile_names())}")
    with refusing("--profile must be a file of JSON", name, "name another file"):
        text = path.read_text(encoding="utf-8")
    return parse_profile(path.stem, text)


def windowed(profile: Profile, num_trained_steps: int) -> Profile:
    """The profile with another number of trained steps. Raises ValueError: more steps than a sample has."""
    rule = f"trained steps must lie in [1, {profile.numbers.num_steps}], the denoise steps of profile {profile.name}"
    require(1 <= num_trained_steps <= profile.numbers.num_steps, rule, num_trained_steps, "2 are usual with a window")
    return profile.changed(num_trained_steps=num_trained_steps)


def parse_profile(name: str, text: str) -> Profile:
    """Parse a profile's JSON. ValueError if it has another form than the shipped ones, or a number is out of bounds."""
    with refusing(f"profile {name} must be JSON in the form of the shipped ones", text[:40], "take one as a pattern"):
        data = json.loads(text)
        entries: dict[str, Any] = dict(data["numbers"])
        about = {key: str(data[key]) for key in ("model", "setting", "device")}
    for key, entry in entries.items():
        has_source = isinstance(entry, dict) and set(entry) == {"value", "source"}
        rule = f"{key} of profile {name} must have a value, and a source that begins with one of {', '.join(SOURCES)}"
        is_told = has_source and str(entry["source"]).startswith(SOURCES)
        require(is_told, rule, entry, "say where the number comes from")
    with refusing(f"profile {name} must have the numbers of the shipped ones", list(entries), "see the cause"):
        numbers = Numbers(**{key: entry["value"] for key, entry in entries.items()})
    found = Profile(name, **about, numbers=numbers)
    check_fields(numbers, f"profile {name}: ")
    require_one_of(f"device of profile {name}", found.device, PEAK_TFLOPS)
    return windowed(found, numbers.num_trained_steps)
