# SPDX-License-Identifier: Apache-2.0
"""The table of `make mutations` fits the code: a text that moved would be noticed by hand alone."""

from tests.mutations import ROOT, TABLE, count_in


def test_each_text_is_in_its_file_once_and_its_tests_exist():
    assert [mutation.wrong for mutation in TABLE if count_in(ROOT, mutation) != 1] == []
    files = {word.partition("::")[0] for mutation in TABLE for word in mutation.tests.split() if ".py" in word}
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).exists()] == []
