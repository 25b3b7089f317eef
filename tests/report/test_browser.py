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


CONTRAST = """
[...document.querySelectorAll('.health .level')].map((level) => {
  const line = level.closest('li'), style = (node) => getComputedStyle(node);
  const paint = document.createElement('canvas').getContext('2d');
  const linear = (value) => ((value / 255 + .055) / 1.055) ** 2.4;
  const light = (...colours) => {
    colours.forEach((colour) => { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); });
    const [red, green, blue] = [...paint.getImageData(0, 0, 1, 1).data].map(linear);
    return .2126 * red + .7152 * green + .0722 * blue + .05;
  };
  const text = light(style(level).color);
  const ground = light(style(document.querySelector('section')).backgroundColor, style(line).backgroundColor);
  return [line.className, style(level).color, Math.max(text / ground, ground / text)];
})
"""
"""(level, its colour, contrast with what it stands on) of each line of the first panel; WCAG 2's formula."""


@pytest.mark.parametrize("is_dark", [False, True])
def test_numbers_keep_their_digits_and_each_verdict_has_a_legible_colour_of_its_own(tmp_path, is_dark):
    refresh_report(make_run(tmp_path, num_steps=6))
    with opened((tmp_path / REPORT).as_uri(), size=(1280, 800), is_dark=is_dark) as page:
        assert page.run("[0, 7.3e-7, 0.0125, 0.80824, 950.44, 12345.6, null].map((value) => number(value))") == [
            *("0", "7.30e-7", "0.0125", "0.8082", "950.4", "12,346", "–")
        ]
        assert page.run("[0.198, -0.0204, 0].map((value) => change(value).outerHTML)") == [
            *('<em class="up">+0.2</em>', '<em class="down">−0.02</em>', '<em class="">±0</em>')
        ]
        page.run("document.querySelector('.health .green').classList.replace('green', 'amber')")
        found = page.run(CONTRAST)
        colours = {level: colour for level, colour, _ in found}
        assert set(colours) == {"green", "amber", "red", "unknown"} and len(set(colours.values())) == 4
        assert all(contrast >= 4.5 for *_, contrast in found), found


def test_after_one_validation_a_phone_shows_two_pictures_in_a_row_right_below_the_reward(tmp_path):
    refresh_report(make_run(tmp_path, num_steps=1))
    with opened((tmp_path / REPORT).as_uri(), size=(390, 844)) as page:
        assert page.run("[...document.querySelectorAll('section')].slice(0, 3).map((one) => one.id)") == [
            *("health", "reward", "pictures")
        ]
        assert page.run("[...document.querySelector('#pictures .controls').children].map((one) => one.tagName)") == [
            *("OUTPUT", "SELECT")
        ]
        assert "null" not in page.run("document.querySelector('#pictures').innerText")
        rows = "[...document.querySelectorAll('#pictures .card')].map((one) => one.offsetTop)"
        first, second, third = page.run(rows)
        assert first == second < third
