# SPDX-License-Identifier: Apache-2.0
"""Score of an edit in the drawn world, in 0..1, from the pixels alone: was the instruction followed, is the rest kept.

The edited picture is compared with the scene that was asked for, by the parts of `shapes`:

- `followed`: the part of the attribute that the instruction names.
- `kept`: the mean of the other parts of colour, shape, position, count and background.

The score is their mean: the picture as it was scores about 0.5, and so does the right attribute in a picture that lost
all others. Source: made for this project.

Example:
    truth = {"target": "a red circle on the left on a blue background", "changed": "colour"}
    compute_score("tiny_edit", picture, truth)
    # {"score": 0.99, "followed": 1.0, "kept": 0.98}
"""

from typing import Any

import numpy as np
from drawn_edits import VALUES
from shapes_reward import WEIGHTS
from shapes_reward import compute_score as score_scene


def compute_score(
    data_source: str, solution_image: np.ndarray, ground_truth: dict[str, Any], extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score an edited picture, uint8 [H, W, 3].

    Args:
        ground_truth: "target", the caption of the scene that was asked for, and "changed", the attribute that the
            instruction names, one of colour, shape, position, background.

    `data_source` and `extra_info` are part of the calling convention and are not read.

    Raises:
        ValueError: another reference, or a picture of another kind.
    """
    if not isinstance(ground_truth, dict) or set(ground_truth) != {"target", "changed"}:
        raise ValueError(
            f'the ground truth of shape_edit must be a mapping of "target" and "changed", got {ground_truth!r}'
        )
    changed = ground_truth["changed"]
    if changed not in VALUES:
        raise ValueError(f'"changed" of shape_edit must be one of {", ".join(VALUES)}, got {changed!r}')
    parts = score_scene(data_source, solution_image, ground_truth["target"])
    followed = parts[changed]
    kept = float(np.mean([parts[name] for name in WEIGHTS if name != changed]))
    return {"score": (followed + kept) / 2, "followed": followed, "kept": kept}
