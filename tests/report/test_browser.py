# SPDX-License-Identifier: Apache-2.0
"""The report's page in a real browser: everything is drawn, nothing fails, and a phone need not scroll sideways."""

import pytest

from tests.chromium import needs_chromium, opened
from tests.report.runs import make_run
from verl_digen.observe.run_files import REPORT
from verl_digen.report.page import refresh_report

pytestmark = needs_chromium


@pytest.mark.parametrize(("size", "is_dark"), [((1280, 800), False), ((390, 844), True)])
def test_the_page_is_drawn_without_an_error_and_fits_its_width(tmp_path, size, is_dark):
    refresh_report(make_run(tmp_path))
    with opened((tmp_path / REPORT).as_uri(), size=size, is_dark=is_dark) as page:
        assert page.run("document.querySelectorAll('section').length") == 11
        assert page.run("document.documentElement.classList.contains('dark')") == is_dark
        assert page.run("document.documentElement.scrollWidth") <= size[0]
        assert not page.errors
