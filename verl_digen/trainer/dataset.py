# SPDX-License-Identifier: Apache-2.0
"""The dataset verl's data loader draws prompts from (`data.custom_cls`)."""

import logging
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import Dataset

from verl_digen.data.prompts import (
    VERLS_NAMES,
    Columns,
    PromptCheck,
    count_repeated,
    describe_dropped,
    find_too_long,
    read_prompts,
    without,
)
from verl_digen.data.rows import batch_columns
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)


class DiffusionPromptDataset(Dataset):
    """Prompts as rows for verl's loader; the constructor's signature is verl's.

    `data_files` is what `verl_digen.data.splits` lists; None: no prompts, for a run that does not validate. At most the
    first `max_samples` prompts are kept; -1 keeps all. With `filter_overlong_prompts` in `config`, the `data:` section,
    prompts that are longer than the checkpoint `custom_cls.checkpoint` reads are left out. ValueError for a malformed
    file, or one of which no prompt is left.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any = None,
        config: DictConfig | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self.prompts: list[PromptRow] = []
        if data_files is None:
            return
        files: Any = OmegaConf.to_container(data_files) if isinstance(data_files, ListConfig) else data_files
        prompts = read_prompts(files, columns=VERLS_NAMES if config is None else Columns.of(config))
        self.prompts = prompts[:max_samples] if max_samples > 0 else prompts
        if num_repeated := count_repeated(self.prompts):
            logger.warning(
                "%d of %d prompts of %s repeat an earlier one: training draws each of them, and validation scores them "
                "again",
                *(num_repeated, len(self.prompts), files),
            )
        if config is not None and config.filter_overlong_prompts:
            self._leave_out_too_long(str(files), config.custom_cls.checkpoint)

    def _leave_out_too_long(self, files: str, checkpoint: str) -> None:
        def load_check() -> PromptCheck:
            from verl_digen.models import load_model
            from verl_digen.models.locate import locate

            return load_model(locate(checkpoint)).load_prompt_check()

        too_long = find_too_long(self.prompts, load_check)
        if too_long:
            logger.warning("%s", describe_dropped(files, too_long, len(self.prompts)))
        self.prompts = without(self.prompts, too_long)
        if not self.prompts:
            raise ValueError(f"{files} must hold a prompt that the model reads to its end, got none; shorten them")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return batch_columns(replace(self.prompts[index], index=index))
