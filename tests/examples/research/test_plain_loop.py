# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples/research/plain_loop.py"


@pytest.mark.long
@pytest.mark.grid
def test_the_plain_loop_trains_on_what_it_drew(tmp_path):
    words = ["--steps", "2", "--prompts", "2", "--group", "3", "--micro-batch", "2", "--json", str(tmp_path / "steps")]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, timeout=600)
    first, second = map(json.loads, (tmp_path / "steps").read_text().splitlines())
    assert max(first["ratio_gap_max"], second["ratio_gap_max"]) < 1e-5, "one update per batch"
    assert 0 < first["reward"] < 1 and first["cpu_s"] > 0
