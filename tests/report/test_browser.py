# SPDX-License-Identifier: Apache-2.0
"""The report's page in a real browser: everything is drawn, nothing fails, and a phone need not scroll sideways."""

import socket
import threading

import pytest
import uvicorn

from tests.chromium import needs_chromium, opened
from tests.report.runs import add_validation, make_run, metrics_of
from verl_digen.observe.run_files import METRICS, REPORT
from verl_digen.report.page import refresh_report
from verl_digen.tools.watch import pages
from verl_digen.trainer.run_output import append_metrics

pytestmark = needs_chromium


@pytest.mark.parametrize(("size", "is_dark"), [((1280, 800), False), ((390, 844), True)])
def test_the_page_is_drawn_without_an_error_and_fits_its_width(tmp_path, size, is_dark):
    refresh_report(make_run(tmp_path))
    with opened((tmp_path / REPORT).as_uri(), size=size, is_dark=is_dark) as page:
        assert page.run("document.querySelectorAll('section').length") == 11
        assert page.run("document.documentElement.classList.contains('dark')") == is_dark
        assert page.run("document.documentElement.scrollWidth") <= size[0]
        assert not page.errors


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """`digen watch` of two runs -> (folder, its address)."""
    monkeypatch.setattr(pages, "MAX_SHARE", 1e9)  # a page may be made again at once
    for name in ("a", "b"):
        make_run(tmp_path / name)
    place = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(pages.make_app(tmp_path), log_level="warning"))
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    yield tmp_path, f"http://localhost:{place.getsockname()[1]}/"
    server.should_exit = True
    thread.join(30)


def test_runs_are_chosen_from_the_list_and_laid_over_each_other(watched):
    with opened(watched[1]) as page:
        page.run("document.querySelectorAll('input[type=checkbox]').forEach((tick) => tick.click())")
        go = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Compare 2')"
        page.follow(f"{go}.click()")
        assert page.run("document.querySelectorAll('.js-plotly-plot').length") == 3
        assert page.run("document.querySelectorAll('#pictures img').length") == 6
        against = "document.querySelector('#reward select')"
        page.run(f"{against}.value = 'perf/samples'; {against}.dispatchEvent(new Event('change'))")
        assert page.run("document.querySelector('#reward .xtitle').textContent") == "samples"
        page.follow("document.querySelector('a.name').click()")
        assert page.run("document.querySelector('h1').textContent") == "b", "the newest"
        assert not page.errors


def test_an_open_report_shows_a_new_step_and_keeps_what_was_chosen(watched):
    root, address = watched
    with opened(f"{address}run?name=a") as page:
        said = "document.querySelector('#pictures output').textContent"
        slider, metric = "document.querySelector('#pictures input')", "document.querySelector('#metrics select')"
        assert page.run(said) == "step 4"
        page.run(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        page.run(f"{metric}.value = 'reward/std'; {metric}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.run("scrollTo({top: 500, behavior: 'instant'})")
        append_metrics(root / "a" / METRICS, 5, metrics_of(5))
        add_validation(root / "a", 5)
        page.follow("document.dispatchEvent(new Event('visibilitychange'))")
        assert page.run(said) == "step 2" and page.run(f"{slider}.max") == "3"
        assert page.run(f"{metric}.value") == "reward/std" and page.run("scrollY") == 500
        assert page.run("columns.step.at(-1)") == 5 and not page.errors
