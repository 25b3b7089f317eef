# SPDX-License-Identifier: Apache-2.0
"""GenEval of flow_grpo's reward server (github.com/yifan123/reward-server, `app_geneval.py`, port 18085).

- POST of a pickle `{"images": [JPEG], "meta_datas": [dict], "only_strict": bool}`; a meta data dict is GenEval's:
  `tag`, `include`, perhaps `exclude`, from the columns of the prompt file, and `prompt`.
- Answer: a pickle of lists with an entry per picture. `scores`, which flow_grpo trains on, is at most 1: the mean over
  counts, colours and positions that were asked for; far too many objects make it negative. `strict_rewards` is 1 where
  all are right, `rewards` where GenEval's own rule holds. `group_rewards` and `group_strict_rewards` say the same per
  tag, with -10 for pictures of other tags.

Details: `strict_accuracy`, `strict_accuracy/TAG` of the prompt's own tag; without `only_strict` also `accuracy` and
`accuracy/TAG`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import scores_of
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.reward.servers.protocol import JpegSettings, PickledJpegs
from verl_digen.types import PromptRow, RewardInput


@dataclass(frozen=True)
class GenevalSettings(JpegSettings):
    only_strict: bool = True
    """Leave out GenEval's own rule, as flow_grpo does in training. The score is the same."""


class Geneval(PickledJpegs):
    settings = GenevalSettings

    @classmethod
    def check_row(cls, row: PromptRow) -> None:
        meta_data(row)

    def payload(self, batch: Sequence[RewardInput]) -> Mapping[str, Any]:
        rows = [meta_data(sample.row) for sample in batch]
        return {"meta_datas": rows, "only_strict": self.config.only_strict}

    def read(self, answer: bytes, batch: Sequence[RewardInput]) -> list[Result]:
        found = pickle_of(answer)
        rules = {"strict_accuracy": "strict_rewards"} | ({} if self.config.only_strict else {"accuracy": "rewards"})
        lists = {name: scores_of(found, key, len(batch)) for name, key in {"score": "scores", **rules}.items()}
        return [
            {name: values[place] for name, values in lists.items()}
            | {f"{name}/{sample.row.extra['tag']}": lists[name][place] for name in rules}
            for place, sample in enumerate(batch)
        ]


def meta_data(row: PromptRow) -> dict[str, Any]:
    """GenEval's meta data of a prompt. ValueError if its row has none."""
    missing = [name for name in ("tag", "include") if name not in row.extra]
    if missing:
        raise ValueError(
            f"a prompt of GenEval must have the columns tag and include, got {row.place or repr(row.text)} without "
            f"{' and '.join(missing)}; take flow_grpo's dataset/geneval files, or another protocol"
        )
    return {**row.extra, "prompt": row.text}


PROTOCOL = Geneval
