# SPDX-License-Identifier: Apache-2.0
"""The report's page in a real browser: everything is drawn, nothing fails, and a phone need not scroll sideways."""

import pytest

from tests.chromium import needs_chromium, opened
from tests.report.runs import make_run
from verl_digen.observe.health import RULES
from verl_digen.observe.run_files import REPORT
from verl_digen.report.page import refresh_report

pytestmark = needs_chromium


@pytest.mark.parametrize(("size", "is_dark"), [((1280, 800), False), ((390, 844), True)])
def test_the_page_is_drawn_without_an_error_and_fits_its_width(tmp_path, size, is_dark):
    refresh_report(make_run(tmp_path, num_steps=6))
    with opened((tmp_path / REPORT).as_uri(), size=size, is_dark=is_dark) as page:
        assert page.run("document.querySelectorAll('section').length") == 12
        assert page.run("document.documentElement.classList.contains('dark')") == is_dark
        assert page.run("document.documentElement.scrollWidth") <= size[0]
        [red, *others] = page.run("[...document.querySelectorAll('.health .red')].map((line) => line.innerText)")
        assert not others and "act\nGroups without spread" in red and "Use easier or harder prompts" in red
        assert page.run("document.querySelectorAll('.health li').length") == len(RULES)
        overflowing = (
            "[...document.querySelectorAll('.health li > *')].filter((one) => one.scrollWidth > one.clientWidth)"
        )
        assert page.run(f"{overflowing}.map((one) => one.innerText)") == []
        assert page.run("document.querySelectorAll('.health .green svg').length") == 3, (
            "of validations and the gradient"
        )
        frames = "document.querySelectorAll('#pictures .card .frame').length"
        assert page.run(frames) == 6, "beside step 0"
        page.run("document.querySelector('#pictures button[aria-pressed=true]').click()")
        assert page.run(frames) == 3
        assert not page.errors


def test_after_one_validation_a_phone_shows_two_pictures_in_a_row_right_below_the_reward(tmp_path):
    refresh_report(make_run(tmp_path, num_steps=1))
    with opened((tmp_path / REPORT).as_uri(), size=(390, 844)) as page:
        assert page.run("[...document.querySelectorAll('section')].slice(0, 3).map((one) => one.id)") == [
            *("health", "reward", "pictures"),
        ]
        assert page.run("[...document.querySelector('#pictures .controls').children].map((one) => one.tagName)") == [
            *("OUTPUT", "SELECT"),
        ]
        assert "null" not in page.run("document.querySelector('#pictures').innerText")
        rows = "[...document.querySelectorAll('#pictures .card')].map((one) => one.offsetTop)"
        first, second, third = page.run(rows)
        assert first == second < third
