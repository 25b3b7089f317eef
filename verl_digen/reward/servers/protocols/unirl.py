# SPDX-License-Identifier: Apache-2.0
"""Reward service of UniRL (github.com/Tencent-Hunyuan/UniRL, `reward_service`, port 8080).

- POST `/score` of JSON `{"requests": [{"history": [{"text": str, "image_b64": str}], "required_rewards": [str],
  "metadata": dict or null}]}`; the history's last turn is scored, images of the prompt's row are turns before it.
- Answer: `{"results": [{reward: {sub-score: number}}], "errors": [{reward: message}]}`; an error fails the samples.
- GET `/rewards` -> `{"rewards": [str]}`, asked once before the first samples.

`metadata` holds the further columns of the prompt's row, its `data_source` and its `ground_truth`. Pictures are JPEG of
quality 95, as its own client sends them, or PNG. A video is sent as pictures: the service wants an encoded file for
`videoalign`, which is not supported. Details: `REWARD/SUB_SCORE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from PIL import Image

from verl_digen.inputs import source_image
from verl_digen.require import In
from verl_digen.reward.base import Result
from verl_digen.reward.pictures import base64_of, images_of
from verl_digen.reward.servers.answers import (
    Answer,
    Declined,
    Request,
    entry_of,
    json_of,
    list_of,
    number_of,
)
from verl_digen.reward.servers.protocol import Protocol, WeightedSettings
from verl_digen.types import RewardInput


@dataclass(frozen=True)
class UnirlSettings(WeightedSettings):
    """Settings of `protocol: unirl`."""

    lossless: bool = False
    """Send PNG, so that the service gets the very pixels, in place of JPEG."""
    jpeg_quality: Annotated[int, In("[1, 100]")] = 95
    """Quality of the JPEG files."""


class Unirl(Protocol):
    """See the module."""

    settings = UnirlSettings

    def hello(self) -> Request:
        """Ask which rewards there are."""
        return Request("/rewards", None)

    def read_hello(self, answer: Answer) -> None:
        """Compare them with `rewards`."""
        served = entry_of(json_of(answer), "rewards")
        missing = [name for name in self.config.rewards if name not in served]
        if missing:
            raise Declined(f"the service has the rewards {served}, not {', '.join(missing)}; change rewards")

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode pictures, prompts and the prompts' further columns."""
        requests = [
            {
                "history": [
                    *(
                        {"text": sample.row.text, "image_b64": self._file(source_image(path).read())}
                        for path in sample.row.images
                    ),
                    {"text": sample.row.text, "image_b64": self._file(images_of(sample)[0])},
                ],
                "required_rewards": list(self.config.rewards),
                "metadata": _metadata(sample),
            }
            for sample in batch
        ]
        return Request("/score", json.dumps({"requests": requests}).encode(), "application/json")

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result]:
        """Read the weighted sum, and every sub-score."""
        found = json_of(answer)
        results = list_of(entry_of(found, "results"), len(batch), "results")
        errors = list_of(found.get("errors") or [{}] * len(batch), len(batch), "errors")
        for place, error in enumerate(errors):
            if error:
                raise Declined(f"picture {place + 1} of {len(batch)}: {str(error)[:500]}")
        return [self._result(one, f"results[{place}]") for place, one in enumerate(results)]

    def _result(self, result: Any, where: str) -> Result:
        found: dict[str, dict[str, float]] = {}
        for reward in self.config.rewards:
            subs = entry_of(result, reward)
            named = subs if isinstance(subs, Mapping) else {reward: subs}
            found[reward] = {name: number_of(value, f"{where}.{reward}.{name}") for name, value in named.items()}
        return self.config.result(found)

    def _file(self, image: Image.Image) -> str:
        format = "PNG" if self.config.lossless else "JPEG"
        return base64_of(image, format, quality=self.config.jpeg_quality)


def _metadata(sample: RewardInput) -> dict[str, Any]:
    """The prompt's further columns, with its source and ground truth."""
    row = sample.row
    return {"data_source": row.data_source, "ground_truth": row.ground_truth, **row.extra}


PROTOCOL = Unirl
