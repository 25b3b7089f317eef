# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run as small WebP files in the page: validation prompts over the steps, best and worst of groups.

Steps are thinned out evenly until the pictures fit; a video is shown as its filmstrip.

*Invariants:* the pictures take at most `VALIDATION_CHARS` and `TRAINING_CHARS`; the first and the last step are shown.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from verl_digen.observe.run_files import TRAINED, VALIDATED, group_dir, image_path, json_in, pictured_steps, step_dir
from verl_digen.report.curves import rounded, thinned

VALIDATION_CHARS, TRAINING_CHARS = 3_000_000, 1_000_000
MAX_PROMPTS, MAX_GROUPS = 24, 6
MAX_STEPS = 16
MAX_REWARD_STEPS = 120
"""Validations whose rewards are shown per prompt."""
THUMB_PX, STRIP_PX = 256, (560, 160)
"""Longer side of a picture; bounds of one that is more than `STRIP_ASPECT` times as wide as high."""
STRIP_ASPECT = 1.6
SHARP_PX = 96
"""Longer side up to which a picture is kept as it is, without loss."""
QUALITY = 78
MAX_PROMPT_CHARS = 600


def thumbnail(path: Path) -> str | None:
    """The picture as a small data URL; None if there is none."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except OSError:  # not written yet, or cut off
        return None
    is_strip = picture.width > STRIP_ASPECT * picture.height
    picture.thumbnail(STRIP_PX if is_strip else (THUMB_PX, THUMB_PX), Image.Resampling.LANCZOS)
    file = BytesIO()
    picture.save(file, "webp", quality=QUALITY, lossless=max(picture.size) <= SHARP_PX)
    return f"data:image/webp;base64,{b64encode(file.getvalue()).decode()}"


def validations(run_dir: Path, last_step: int) -> dict[str, Any]:
    """Pictures and rewards of validation prompts up to `last_step`, of the newest validation's prompts: `pictures`, of
    each of `steps` and each prompt a data URL or None; `rewards`, of each of `reward_steps` and each prompt a number or
    None."""
    found = [step for step in pictured_steps(run_dir, VALIDATED) if step <= last_step]
    shown = {step: entries(step_dir(run_dir, step)) for step in (*thinned(found, MAX_REWARD_STEPS), *found[-1:])}
    newest = shown[found[-1]] if found else []
    uids = [entry["uid"] for entry in newest[:MAX_PROMPTS]]

    def encode(step: int) -> list[str | None]:
        return [thumbnail(image_path(run_dir, step, uid)) for uid in uids]

    steps, pictures = _fitting(found, encode, VALIDATION_CHARS)
    of_step = [{entry["uid"]: entry["reward"] for entry in shown[step]} for step in sorted(shown)]
    return {
        "prompts": [entry["prompt"][:MAX_PROMPT_CHARS] for entry in newest[:MAX_PROMPTS]],
        "steps": steps,
        "pictures": pictures,
        "reward_steps": sorted(shown),
        "rewards": [[rounded(rewards.get(uid)) for uid in uids] for rewards in of_step],
        "num_left_out": len(found) - len(steps),
        "num_prompts_left_out": len(newest) - len(uids),
    }


def groups(run_dir: Path, last_step: int) -> dict[str, Any]:
    """Best and worst samples of training groups up to `last_step`: of each of `steps` a list of groups, each a list of
    `prompt`, which begins with best or worst, `reward` and `picture`."""
    found: dict[int, list[list[Any]]] = {}
    for step in pictured_steps(run_dir, TRAINED):
        shown = json_in(group_dir(run_dir, step).with_suffix(".json"), "shown")["shown"] if step <= last_step else []
        if shown:
            by_uid = groupby(shown, key=lambda entry: entry["file"].rpartition("-")[0])
            found[step] = [list(own) for _, own in by_uid][:MAX_GROUPS]

    def encode(step: int) -> list[str | None]:
        return [thumbnail(group_dir(run_dir, step) / entry["file"]) for own in found[step] for entry in own]

    def sample(entry: Any, picture: str | None) -> dict[str, Any]:
        reward = rounded(entry["reward"])
        return {"prompt": entry["prompt"][:MAX_PROMPT_CHARS], "reward": reward, "picture": picture}

    steps, pictures = _fitting(list(found), encode, TRAINING_CHARS)
    left = {step: iter(of_step) for step, of_step in zip(steps, pictures, strict=True)}
    return {
        "steps": steps,
        "groups": [[[sample(entry, next(left[step])) for entry in own] for own in found[step]] for step in steps],
        "num_left_out": len(found) - len(steps),
    }


def entries(folder: Path) -> list[Any]:
    """Samples of a validation, each with `uid`, `prompt` and `reward`."""
    return json_in(folder.with_suffix(".json"))


def _fitting(
    steps: Sequence[int], encode: Callable[[int], list[str | None]], most_chars: int
) -> tuple[list[int], list[list[str | None]]]:
    """Steps that are shown and their pictures: as many as fit, at least the first and the last."""
    chosen = thinned(steps, MAX_STEPS)
    encoded = {step: encode(step) for step in chosen}
    sizes = {step: sum(len(picture) for picture in pictures if picture) for step, pictures in encoded.items()}
    while len(chosen) > 2 and (size := sum(map(sizes.__getitem__, chosen))) > most_chars:
        chosen = thinned(chosen, max(2, min(len(chosen) - 1, int(len(chosen) * most_chars / size))))
    return chosen, [encoded[step] for step in chosen]
