# SPDX-License-Identifier: Apache-2.0
"""Questions from templates."""

import pytest

from verl_digen.reward.judges.question import fields_of, filled
from verl_digen.types import PromptRow

ROW = PromptRow("a {strange} cat", "test", {"count": 3}, extra={"tag": "counting", "none": None}, place="line 7 of 'x'")


def test_a_question_holds_the_rows_own_columns():
    asked = filled('{prompt}, {ground_truth}, {tag}, {{"score": 4}}', ROW, "judge: question")
    assert asked == "a {strange} cat, {'count': 3}, counting, {\"score\": 4}"


def test_fields_are_listed_in_order():
    assert fields_of("{tag} {prompt} {tag}", "q") == ("tag", "prompt", "tag")


@pytest.mark.parametrize(
    "question", ["{", "a } b", "{prompt.__class__}", "{prompt[0]}", "{prompt!r}", "{prompt:>9}", "{}"]
)
def test_a_brace_with_more_than_a_name_is_refused(question):
    with pytest.raises(ValueError, match=r"judge\.question must .* twice"):
        fields_of(question, "judge.question")


@pytest.mark.parametrize("name", ["include", "none"])
def test_a_column_that_the_row_lacks_is_named_with_its_place(name):
    with pytest.raises(ValueError, match=rf"must name columns .*prompt, tag.*'{name}'; add it to the row \(line 7"):
        filled("{" + name + "}", ROW, "judge: question")
