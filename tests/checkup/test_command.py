# SPDX-License-Identifier: Apache-2.0
"""`digen doctor --gpu --device cpu` as a user types it: six processes, Ray twice, verl's main."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_digen.checkup.registry import CHECKS


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.grid
def test_every_check_passes_here(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-c", "import sys; from verl_digen.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "doctor", "--gpu", "--device", "cpu", "--json", "doctor.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {check["name"]: check for check in json.loads((tmp_path / "doctor.json").read_text())["checks"]}
    assert list(outcomes) == list(CHECKS) and all(one["passed"] for one in outcomes.values())
    assert outcomes["training"]["figure"].startswith("3 steps on 1 device(s) in ")
    assert "GB/s" in outcomes["update"]["figure"]
