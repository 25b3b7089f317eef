# SPDX-License-Identifier: Apache-2.0
"""Score of how well a picture shows its caption, in 0..1, from the pixels alone.

Parts, each in 0..1:

- `background`: the pixels that are not object have the caption's background colour.
- `colour`: the object pixels have the caption's colour.
- `shape`: each object, compared with a circle, a square and a triangle of its own area and centre, overlaps
  the caption's shape well, and better than the other two.
- `position`: the objects' common centre is at the named place (captions with a position only; otherwise it
  repeats `presence` and has no weight).
- `count`: the number of objects is the caption's; specks count in part.

An object is a connected region that differs from the colour of the picture's border. `presence` (not
returned) is 1 if there are objects and they leave room for a background; it multiplies all of
the above, `background` by (1 + presence) / 2, so that drawing nothing, or everything, is not rewarded.

A video is scored frame by frame, and each part is the mean over the frames: a shape that is visible in
half of the frames earns half. Motion is not scored.

Bounds over all captions (held by `tests/examples/test_drawn_world.py`): a flat picture scores
at most 0.075 (on the right background), uniform noise at most 0.1. A clean drawing scores at least 0.97; with
one attribute wrong it loses at least 0.1 (position, count, background) or 0.2 (shape, colour).

Example:
    compute_score("digen_shapes", picture, "a red circle on the left on a blue background")
    # {"score": 0.99, "colour": 1.0, "shape": 0.98, "position": 1.0, "count": 1.0, "background": 0.99}
"""

import math
from typing import Any

import numpy as np
from drawn_scenes import ANCHORS, RGB, SHAPES, Scene, parse_caption, shape_distance
from PIL import Image

WEIGHTS = {"colour": 0.25, "shape": 0.25, "position": 0.2, "count": 0.15, "background": 0.15}
"""Weight of each part; in a caption without a position, `position`'s weight is added to `count`'s."""

WORK_PX = 64
"""Size to which pictures are scaled before scoring; makes the areas below comparable and bounds the time."""

COLOUR_WIDTH = 0.3
"""Colour likeness is exp(-(d / width)^2), d the RGB distance on a 0..1 scale: 0.9 at 0.1, 0.17 at 0.4."""

MIN_CONTRAST = 0.15
"""Minimum distance of an object pixel from the border colour; it must also exceed half the median of such distances."""

SPECK_PX, OBJECT_PX = 12, 48
"""Region sizes: at most SPECK_PX pixels count as 0 objects, OBJECT_PX or more as 1, linear between."""

MAX_COVER = (0.4, 0.6)
"""Fractions of the picture covered by objects: presence falls from 1 at the first to 0 at the second."""

SHAPE_OVERLAP = (0.45, 0.85)
"""Intersection over union with the caption's shape that earns 0 and 1, linear between."""

SHAPE_MARGIN = 0.04
"""Softmax temperature, in units of overlap, of the choice between the three shapes."""

PLACE_RADIUS = (0.07, 0.26)
"""Distance from the named place, as a fraction of the picture: 1 is earned up to the first, 0 from the second."""

COUNT_WIDTH = 0.8
"""Width of the count's score exp(-(error / width)^2): 0.21 for one object too many or too few."""


def compute_score(
    data_source: str,
    solution_image: np.ndarray,
    ground_truth: str | dict[str, Any],
    extra_info: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Score a picture, uint8 [H, W, 3], or a video, uint8 [F, H, W, 3] (the mean over its frames).

    `ground_truth` is the caption, or the fields of a `Scene`. `data_source` and `extra_info` are part of
    the calling convention and are not read. A picture of another kind, or a caption outside the world, is a
    `ValueError`.
    """
    scene = parse_caption(ground_truth) if isinstance(ground_truth, str) else Scene(**ground_truth)
    picture = np.asarray(solution_image)
    if picture.dtype != np.uint8 or picture.ndim not in (3, 4) or picture.shape[-1] != 3:
        raise ValueError(
            "a picture must be uint8 [H, W, 3] or a video uint8 [F, H, W, 3], "
            f"got {picture.dtype} {list(picture.shape)}; convert it before scoring"
        )
    frames = picture[None] if picture.ndim == 3 else picture
    parts = [_score_frame(frame, scene) for frame in frames]
    return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}


def _score_frame(frame: np.ndarray, scene: Scene) -> dict[str, float]:
    if frame.shape[:2] != (WORK_PX, WORK_PX):
        frame = np.asarray(Image.fromarray(frame).resize((WORK_PX, WORK_PX), Image.Resampling.BOX))
    pixels = frame.astype(np.float32) / 255
    mask = _object_mask(pixels)
    regions = _regions(mask)
    areas = np.array([len(rows) for rows, _ in regions])
    weights = _ramp(areas, SPECK_PX, OBJECT_PX)
    presence = min(1.0, float(weights.sum())) * (1 - float(_ramp(mask.mean(), *MAX_COVER)))

    parts = dict.fromkeys(WEIGHTS, 0.0)
    likeness = _likeness(pixels[~mask], scene.background)
    parts["background"] = float(likeness.mean()) * (1 + presence) / 2 if likeness.size else 0.0
    if presence > 0:
        objects = [region for region, weight in zip(regions, weights, strict=True) if weight > 0]
        rows, cols = (np.concatenate(axis) for axis in zip(*objects, strict=True))
        core = _core_colours(pixels, mask, rows, cols)
        parts["colour"] = presence * float(_likeness(core, scene.colour).mean())
        fits = [_shape_fit(region, scene.shape) for region in objects]
        parts["shape"] = presence * float(np.average(fits, weights=(areas * weights)[weights > 0]))
        parts["count"] = presence * math.exp(-(((weights.sum() - scene.count) / COUNT_WIDTH) ** 2))
        if scene.position is None:
            parts["position"] = presence
        else:
            x, y = (np.array([cols.mean(), rows.mean()]) + 0.5) / WORK_PX
            error = math.dist((x, y), ANCHORS[scene.position])
            parts["position"] = presence * (1 - float(_ramp(error, *PLACE_RADIUS)))

    worth = dict(WEIGHTS)
    if scene.position is None:
        worth["count"] += worth.pop("position")
    return {"score": sum(weight * parts[name] for name, weight in worth.items()), **parts}


def _ramp(value: Any, low: float, high: float) -> np.ndarray:
    """0 up to `low`, 1 from `high`, linear between."""
    return np.clip((np.asarray(value, dtype=np.float64) - low) / (high - low), 0, 1)


def _likeness(colours: np.ndarray, name: str) -> np.ndarray:
    """[N, 3] colours on a 0..1 scale -> [N] likeness with the named colour."""
    square_distance = np.square(colours - np.array(RGB[name], dtype=np.float32) / 255).sum(-1)
    return np.exp(-square_distance / COLOUR_WIDTH**2)


def _object_mask(pixels: np.ndarray) -> np.ndarray:
    """[H, W, 3] -> bool [H, W]: pixels that differ from the median colour of a two-pixel border."""
    sides = (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:])
    border = np.concatenate([side.reshape(-1, 3) for side in sides])
    distance = np.sqrt(np.square(pixels - np.median(border, axis=0)).sum(-1))
    far = distance[distance > MIN_CONTRAST]
    if not far.size:
        return np.zeros(distance.shape, dtype=bool)
    # An anti-aliased or blurred edge lies halfway between background and object colour.
    return distance > max(MIN_CONTRAST, float(np.median(far)) / 2)


def _core_colours(pixels: np.ndarray, mask: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """[N, 3] colours of the given object pixels, without the outermost ones, whose colours are mixed."""
    core = mask.copy()
    core[1:] &= mask[:-1]
    core[:-1] &= mask[1:]
    core[:, 1:] &= mask[:, :-1]
    core[:, :-1] &= mask[:, 1:]
    is_core = core[rows, cols]
    return pixels[rows[is_core], cols[is_core]] if is_core.any() else pixels[rows, cols]


def _regions(mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The 4-connected regions of `mask`, each as (rows, cols) of its pixels; specks are left out.

    Horizontal runs are joined by union-find: a clean picture has some 50 of them, noise some 1,000.
    """
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    run_rows, run_starts = np.nonzero(edges == 1)
    run_ends = np.nonzero(edges == -1)[1]
    rows, starts, ends = run_rows.tolist(), run_starts.tolist(), run_ends.tolist()
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    above = 0
    for run, row in enumerate(rows):
        while rows[above] < row - 1 or (rows[above] == row - 1 and ends[above] <= starts[run]):
            above += 1
        other = above
        while other < run and rows[other] == row - 1 and starts[other] < ends[run]:
            parent[root(other)] = root(run)
            other += 1

    roots = np.array([root(run) for run in range(len(rows))], dtype=int)
    lengths = run_ends - run_starts
    areas = np.bincount(roots, weights=lengths, minlength=len(rows)) if len(rows) else np.zeros(0)
    regions = []
    for label in np.nonzero(areas > SPECK_PX)[0]:
        members = np.nonzero(roots == label)[0]
        regions.append(
            (
                np.repeat(run_rows[members], lengths[members]),
                np.concatenate([np.arange(starts[run], ends[run]) for run in members]),
            )
        )
    return regions


def _shape_fit(region: tuple[np.ndarray, np.ndarray], shape: str) -> float:
    """Fit of one region to the named shape: ramped overlap, times its softmax share among the three shapes."""
    rows, cols = region
    area = len(rows)
    reach = int(1.2 * math.sqrt(area)) + 1  # holds the largest of the three shapes (the triangle's tip)
    center_x, center_y = cols.mean(), rows.mean()
    x = np.arange(int(center_x) - reach, int(center_x) + reach + 1) - center_x
    y = np.arange(int(center_y) - reach, int(center_y) + reach + 1) - center_y
    overlaps = {}
    for name in SHAPES:
        common = int((shape_distance(name, cols - center_x, rows - center_y, area) > 0).sum())
        drawn = int((shape_distance(name, x[None, :], y[:, None], area) > 0).sum())
        overlaps[name] = common / (area + drawn - common)
    rivals = sum(math.exp((overlap - overlaps[shape]) / SHAPE_MARGIN) for overlap in overlaps.values())
    return float(_ramp(overlaps[shape], *SHAPE_OVERLAP)) / rivals
