# SPDX-License-Identifier: Apache-2.0
"""The report's page in a real browser, Chromium without a window and without a network."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.runs import HOSTILE, make_run
from verl_digen.observe.run_files import METRICS, REPORT
from verl_digen.report.page import write_report
from verl_digen.trainer.run_output import append_metrics

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
TIMEOUT_S = 120


def dom_of(page: Path, script: str = "") -> str:
    """The document after its scripts have run, and `script` after them."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2000"),
            *(f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *("--virtual-time-budget=5000", "--dump-dom", probe.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout


def section(dom: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">.*?</section>', dom, re.DOTALL)
    assert found is not None, name
    return found[0]


def test_a_whole_run_is_drawn_and_its_texts_stay_texts(tmp_path):
    write_report(make_run(tmp_path / "run"), tmp_path / REPORT)
    dom = dom_of(tmp_path / REPORT)
    assert 'data-drawn="11"' in dom, "the script reached its end"
    assert re.search(r"<title>run · report</title>", dom), "no text of the run was run"
    for name, least in (
        ("reward", 1),
        ("rewards", 1),
        ("distributions", 2),
        ("speed", 3),
        ("timeline", 1),
        ("metrics", 1),
    ):
        assert section(dom, name).count('class="main-svg"') >= least, name
    assert section(dom, "pictures").count("<img") == 3 and section(dom, "groups").count("<img") == 2
    assert html.escape(HOSTILE, quote=False) in section(dom, "pictures")
    assert html.escape(HOSTILE, quote=False) in section(dom, "warnings")
    assert "staleness_bound" not in section(dom, "timeline") and "generating" in section(dom, "timeline")
    assert 'class="empty"' not in dom


def test_the_slider_shows_the_pictures_and_rewards_of_its_step(tmp_path):
    write_report(make_run(tmp_path / "run"), tmp_path / REPORT)
    move = """
        const range = document.querySelector("#pictures input[type=range]");
        range.value = 0; range.dispatchEvent(new Event("input"));
    """
    first, last = (section(dom, "pictures") for dom in (dom_of(tmp_path / REPORT, move), dom_of(tmp_path / REPORT)))
    assert "step 0</output>" in first and "step 4</output>" in last
    assert re.findall(r"<b>([\d.]+)</b>", first) == ["0", "1", "2"]
    assert re.findall(r"<b>([\d.]+)</b>", last) == ["0.04", "1.04", "2.04"] and last.count("+0.04") == 3
    pictures = [re.findall(r'<img src="(data:[^"]*)"', one) for one in (first, last)]
    assert len(pictures[0]) == len(pictures[1]) == 3 and not set(pictures[0]) & set(pictures[1])


def test_a_run_that_just_began_shows_sentences_in_place_of_plots(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    append_metrics(run_dir / METRICS, 0, {"val/reward": 0.5})
    write_report(run_dir, tmp_path / REPORT)
    dom = dom_of(tmp_path / REPORT)
    assert 'data-drawn="11"' in dom
    for name in ("distributions", "pictures", "groups", "speed", "timeline", "metrics", "config", "versions"):
        assert 'class="empty"' in section(dom, name), name
        assert "main-svg" not in section(dom, name)
    assert section(dom, "reward").count('class="main-svg"') >= 1, "the validation is a point"
