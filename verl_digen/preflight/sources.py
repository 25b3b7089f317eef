# SPDX-License-Identifier: Apache-2.0
"""Rules for rewards of some prompts alone (`digen.reward.functions.NAME.data_sources`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl_digen.config import digen_config
from verl_digen.require import require, suggestion
from verl_digen.reward.named import has_custom

if TYPE_CHECKING:
    from verl_digen.types import PromptRow


def check_sources(config: DictConfig, train: Sequence[PromptRow], val: Sequence[PromptRow]) -> None:
    """Require a trained reward for every prompt, a prompt for every source that an entry names, and for every gold
    reward a validation prompt.

    Args:
        train: prompts of training.
        val: prompts of validation; empty if the run does not validate.
    """
    reward = digen_config(config).reward
    routed = [entry for entry in reward.entries if entry.data_sources is not None]
    if not routed:
        return
    validated = sorted({prompt.data_source for prompt in val})
    sources = sorted({*validated, *(prompt.data_source for prompt in train)})
    for entry in routed:
        unknown = [source for source in entry.data_sources or () if source not in sources]
        require(
            not unknown,
            f"{entry.key}.data_sources must name a data_source of the prompts, which have {', '.join(sources)}",
            unknown,
            f"{suggestion(unknown[0], sources) if unknown else ''}take it out",
        )
        require(
            not entry.is_gold or not validated or any(entry.covers(source) for source in validated),
            f"{entry.key}.data_sources must name a data_source of the prompts of data.val_files, which have "
            f"{', '.join(validated)}",
            list(entry.data_sources or ()),
            "a gold reward is compared at validations; add one of them",
        )
    if has_custom(config) and reward.custom_weight != 0:
        return
    trained = [entry for entry in reward.entries if entry.weight != 0]
    uncovered = [source for source in sources if not any(entry.covers(source) for entry in trained)]
    require(
        not uncovered,
        "every data_source of the prompts must be scored by a reward whose weight is not 0",
        uncovered,
        "add it to digen.reward.functions.NAME.data_sources of a reward, or take its prompts out of the files",
    )
