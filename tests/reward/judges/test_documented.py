# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/rewards.md are what Hydra takes from a shell, and pass the checks of a run."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.docs.blocks import blocks_of
from verl_digen.config import RewardConfig
from verl_digen.reward.named import check

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


def examples() -> list[str]:
    """Values of digen.reward.functions in the page, as a shell hands them on."""
    shell = [block for block in blocks_of(PAGE) if block.language == "bash"]
    words = [word for block in shell for command in block.commands for word in command]
    return [word for word in words if word.startswith("digen.reward.functions=")]


def test_the_page_has_an_example_of_every_judge():
    named = " ".join(examples())
    for name in ("reward: judge", "yes_no", "unified_reward:", "unified_reward2", "ocr_vlm", "win_rate"):
        assert name in named, name


@pytest.mark.parametrize("example", examples())
def test_an_example_passes_the_checks(example):
    functions = OverridesParser.create().parse_override(example).value()
    entries = RewardConfig(functions=functions).entries
    assert entries
    for entry in entries:
        check(entry)
