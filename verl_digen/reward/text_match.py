# SPDX-License-Identifier: Apache-2.0
"""How well a text that was read matches the text that a prompt asks for: flow_grpo's OCR reward, without the OCR.

    reward = 1 - min(distance, len(target)) / len(target), in 0..1

- Both texts are lower-cased and lose their spaces (U+0020); any other character counts, line breaks too.
- The distance is 0 where the target is a part of what was read, else Levenshtein's. So further text beside the right
  one costs nothing, and an empty page has reward 0.

Source: flow_grpo/ocr.py of https://github.com/yifan123/flow_grpo.
"""

from __future__ import annotations

from verl_digen.data.prompts import quoted_text
from verl_digen.require import require
from verl_digen.reward.packages import imported


def text_target(prompt: str) -> str:
    """The text that a prompt asks for: its first part in double quotes, as it stands there.

    Raises:
        ValueError: it has no such part, or an empty one.

    Example:
        text_target('a shop sign that says "Open Now"')  # 'Open Now'
    """
    quoted = quoted_text(prompt)
    if not quoted.strip():
        raise ValueError(
            f"a prompt of a text reward must have the text to show in double quotes, got {prompt[:200]!r}; quote it, "
            "or give it as the row's ground truth"
        )
    return quoted


def text_reward(read: str, target: str) -> float:
    """Reward of a text that was read, for the text asked for; see the module.

    Raises:
        ValueError: the target has no character but spaces; rapidfuzz is not installed.

    Example:
        text_reward("open n0w", "Open Now")  # 1 - 1 / 7
    """
    wanted = _plain(target)
    require(
        bool(wanted),
        "the target of a text reward must have a character that is not a space",
        target,
        "write the text to show in double quotes in the prompt, or as the row's ground truth",
    )
    found = _plain(read)
    if wanted in found:
        return 1.0
    levenshtein = imported("rapidfuzz.distance.Levenshtein", "of texts (ocr and judges that read)")
    return 1.0 - min(levenshtein.distance(found, wanted), len(wanted)) / len(wanted)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()
