# SPDX-License-Identifier: Apache-2.0
"""Text of a prompt as the two parts of LTX-2's network read it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl_digen.types import Condition


def connected(pipeline: Any, embeds: Tensor, mask: Tensor) -> Condition:
    """Run the connectors of a pipeline on hidden states of one prompt -> {"embeds": [L, D], "audio": [L, D]}.

    Args:
        pipeline: diffusers', or one with its `connectors` and `tokenizer`. embeds, mask: from its `encode_prompt`.

    Raises:
        RuntimeError: the connectors leave padding where the network expects none.
    """
    video, audio, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
    if not bool(mask.all()):
        raise RuntimeError(
            "the connectors must put registers in the place of padding, got a mask with zeros: "
            "video_connector_num_learnable_registers is null in actor_rollout_ref.model.path; choose another "
            "checkpoint, such as Lightricks/LTX-2"
        )
    return {"embeds": video[0], "audio": audio[0]}
