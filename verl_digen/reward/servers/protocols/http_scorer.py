# SPDX-License-Identifier: Apache-2.0
"""Scorer services of deepgen_rl (`rewards_services/api_services`), which verl-omni's `http_scorer_client` asks, too.

- POST of a pickle `{"images": [JPEG], "prompts": [str], "metadata": dict}`; ports from 18080 on, one per scorer.
- Answer: a pickle `{"scores": [number]}`, or `{"error": str}`, which fails the samples.

Details: further lists of numbers in the answer with an entry per picture, e.g. GenEval's `rewards`, `strict_rewards`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import Declined, numbers_of, scores_of
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.reward.servers.protocol import JpegSettings, PickledJpegs
from verl_digen.types import RewardInput


@dataclass(frozen=True)
class HttpScorerSettings(JpegSettings):
    metadata: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the service, e.g. `{only_strict: true}` of its GenEval."""
    sends_rows: bool = False
    """Add the prompts' further columns as `metadata["meta_datas"]`, which its GenEval needs."""


class HttpScorer(PickledJpegs):
    settings = HttpScorerSettings

    def payload(self, batch: Sequence[RewardInput]) -> Mapping[str, Any]:
        rows = [{**sample.row.extra, "prompt": sample.row.text} for sample in batch]
        metadata = {**self.config.metadata, **({"meta_datas": rows} if self.config.sends_rows else {})}
        return {"prompts": [sample.row.text for sample in batch], "metadata": metadata}

    def read(self, answer: bytes, batch: Sequence[RewardInput]) -> list[Result]:
        found = pickle_of(answer)
        if isinstance(found, Mapping) and "error" in found:
            raise Declined(str(found["error"]).strip()[-500:])  # the end of a traceback says more
        scores = scores_of(found, "scores", len(batch))
        details = {
            str(name): numbers_of(values, len(batch), str(name))
            for name, values in found.items()
            if name not in ("scores", "score") and isinstance(values, list) and len(values) == len(batch)
            if all(isinstance(one, int | float) for one in values)
        }
        return [
            {"score": score} | {name: values[place] for name, values in details.items()}
            for place, score in enumerate(scores)
        ]


PROTOCOL = HttpScorer
