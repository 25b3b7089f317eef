# SPDX-License-Identifier: Apache-2.0
"""Reading the user's JSON files, with errors that name the file and the config key of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(file: Path, key: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
        key: config key of the file's folder, e.g. "actor_rollout_ref.model.path".

    Raises:
        ValueError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} must hold a readable {file.name}, got {str(file)!r}, which is damaged ({error}); complete the "
            "download"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{key} must hold a {file.name} with a JSON object, got a {type(value).__name__} in {str(file)!r}; "
            "complete the download"
        )
    return value
