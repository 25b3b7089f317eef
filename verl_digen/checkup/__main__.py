# SPDX-License-Identifier: Apache-2.0
"""Process of one check: `python -m verl_digen.checkup NAME`, its setting as JSON on stdin.

Writes {"figure": ...}, or {"cause": ..., "remedy": ...}, to `outcome.json` in the check's folder.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from verl_digen.checkup.outcome import CheckFailed
from verl_digen.checkup.registry import CHECKS
from verl_digen.checkup.setting import Setting

OUTCOME = "outcome.json"


def main(name: str, given: dict[str, object]) -> None:
    """Run the check and write its outcome."""
    setting = Setting(**(given | {"folder": Path(str(given["folder"]))}))  # type: ignore[arg-type]
    said: dict[str, str | None]
    try:
        said = {"figure": CHECKS[name](setting)}
    except CheckFailed as failed:
        said = {"cause": failed.cause, "remedy": failed.remedy}
    except Exception as error:  # of a part that the check uses
        traceback.print_exc()
        said = {"cause": f"{type(error).__name__}: {error}", "remedy": None}
    (setting.folder / OUTCOME).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
