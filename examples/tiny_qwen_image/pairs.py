# SPDX-License-Identifier: Apache-2.0
"""Draw preference pairs for the quick start's prompts, the training data of `offline_dpo`.

    python examples/tiny_qwen_image/pairs.py --output outputs/pairs

writes `pairs.jsonl`, the prompts with the columns `chosen` and `rejected`, and the pictures beside it. The chosen
picture shows what the prompt says, the rejected one a scene that disobeys it as the checkpoint was taught to
(`shapes.disobey`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "drawn_world"))

import numpy as np
from drawn_scenes import Scene, draw, parse_caption
from PIL import Image
from shapes import PICTURE_PX, disobey

PROMPTS = Path(__file__).parent / "prompts" / "train.jsonl"


def mistaken(scene: Scene, rng: np.random.Generator) -> Scene:
    """Another scene than `scene`, on the same background."""
    while (found := disobey(scene, 0.5, rng)) == scene:
        pass
    return found


def write_pairs(output: Path, prompts: Path = PROMPTS, *, seed: int = 0, most: int | None = None) -> Path:
    """Write the pairs of the first `most` prompts into the folder `output` -> its `pairs.jsonl`."""
    rng = np.random.default_rng(seed)
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()[:most]]
    for number, row in enumerate(rows):
        scene = parse_caption(row["prompt"])
        for column, shown in (("chosen", scene), ("rejected", mistaken(scene, rng))):
            row[column] = f"pictures/{number:04d}_{column}.png"
            Image.fromarray(draw(shown, PICTURE_PX, rng)).save(output / row[column])
    path = output / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    """Read the command line and write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompt file, JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write_pairs(options.output, options.prompts, seed=options.seed))


if __name__ == "__main__":
    main()
