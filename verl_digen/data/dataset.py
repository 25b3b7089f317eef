# SPDX-License-Identifier: Apache-2.0
"""The dataset verl's data loader draws prompts from (`data.custom_cls`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import Dataset

from verl_digen.data.prompts import read_prompts


class DiffusionPromptDataset(Dataset):
    """Prompts as rows for verl's loader; the constructor's signature is verl's.

    Args:
        data_files: path(s) of prompt files, see `verl_digen.data.prompts`.
        max_samples: keep the first so many prompts; -1 keeps all.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        config: DictConfig | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ):
        files: Any = OmegaConf.to_container(data_files) if isinstance(data_files, ListConfig) else data_files
        prompts = read_prompts(files)
        self.prompts = prompts[:max_samples] if max_samples > 0 else prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt = self.prompts[index]
        return {
            "raw_prompt": prompt.text,
            "negative_prompt": prompt.negative,
            "data_source": prompt.data_source,
            "reward_model": {"ground_truth": prompt.ground_truth},
            "extra_info": prompt.extra_info,
            "index": index,
        }
