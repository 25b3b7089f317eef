# SPDX-License-Identifier: Apache-2.0
"""Each mutation of the table can be made, so that `make mutations` means something; its operators do as they say."""

import ast

import pytest

from tests.mutations.__main__ import problem_of
from tests.mutations.operators import Operator, accept, drop, given, mutated, passes, result, swap
from tests.mutations.table import TABLE

SOURCE = """
class Sum:
    def add(self, value: int, *, most: int = 3) -> int:
        if value > most:
            raise ValueError(value)
        self.parts.append(value)
        self.total += min(value, most)
        return self.rounded(self.total, digits=2)
"""


def test_each_mutation_can_be_made_and_its_tests_exist():
    assert {str(mutation): problem for mutation in TABLE if (problem := problem_of(mutation))} == {}


@pytest.mark.parametrize(
    ("operator", "old", "new"),
    [
        (given(value="-value"), "        if", "        value = -value\n        if"),
        (result("-result"), "return ", "if True:\n            return -result\n        result = "),
        (accept(), "raise ValueError(value)", "pass"),
        (passes(digits="0"), "digits=2", "digits=0"),
        (drop("parts.append"), "self.parts.append(value)", "pass"),
        (swap(">", ">="), "value > most", "value >= most"),
        (swap("value", "0", 3), "append(value)", "append(0)"),
    ],
)
def test_an_operator_changes_what_it_names_alone(operator: Operator, old: str, new: str):
    found = sorted(line.strip() for line in mutated(SOURCE, "add", operator).splitlines())
    assert found == sorted(line.strip() for line in ast.unparse(ast.parse(SOURCE.replace(old, new))).splitlines())
