# SPDX-License-Identifier: Apache-2.0
"""The drawn world: a few flat shapes on a flat background, described by one sentence.

- A caption is `"a red circle on the left on a blue background"` (one shape, with a position) or
  `"two green squares on a black background"` (two or three equal shapes in a row, no position).
- A shape never has the colour of its background.
- Places and sizes are fractions of the picture, so a scene can be drawn at any size.

Invariants: `parse_caption(caption(scene)) == scene` for every scene of `all_scenes()`; `draw` depends on
nothing but its arguments.

Example:
    scene = parse_caption("a red circle on the left on a blue background")
    picture = draw(scene, 64, numpy.random.default_rng(0))    # uint8 [64, 64, 3]
"""

import math
import re
from dataclasses import dataclass
from itertools import product

import numpy as np

RGB = {
    "red": (220, 45, 45),
    "green": (45, 170, 75),
    "blue": (45, 95, 215),
    "yellow": (245, 210, 60),
    "purple": (160, 40, 200),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
}
"""Colour name -> sRGB values, 0..255; any two have a distance of at least 0.4 on the 0..1 scale."""

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
BACKGROUNDS = ("black", "white", "gray", "blue", "green")
COUNTS = (1, 2, 3)

ANCHORS = {"left": (0.27, 0.5), "right": (0.73, 0.5), "top": (0.5, 0.27), "bottom": (0.5, 0.73), "center": (0.5, 0.5)}
"""Position -> (x, y) of the shape's centre of area, as fractions of the picture, y downwards."""

POSITION_JITTER = 0.03
"""Maximum offset of a single shape's centre from its anchor, along x and along y."""

RADIUS = {1: (0.125, 0.155), 2: (0.115, 0.135), 3: (0.085, 0.1)}
"""Count -> range of a shape's size, as a fraction of the picture: the radius of a circle of equal area."""

ROW_X = {2: (0.27, 0.73), 3: (0.18, 0.5, 0.82)}
"""Count -> x of the shapes in a row; a row has y = 0.5."""

ROW_JITTER = (0.015, 0.06)
"""Maximum offset of a shape in a row from its place, along x and along y."""

_COUNT_WORDS = {1: "a", 2: "two", 3: "three"}
_POSITION_WORDS = {
    "left": "on the left",
    "right": "on the right",
    "top": "at the top",
    "bottom": "at the bottom",
    "center": "in the center",
}
_CAPTION = re.compile(
    rf"(?P<count>{'|'.join(_COUNT_WORDS.values())}) (?P<colour>{'|'.join(COLOURS)}) "
    rf"(?P<shape>{'|'.join(SHAPES)})(?P<plural>s?)(?: (?P<position>{'|'.join(_POSITION_WORDS.values())}))? "
    rf"on a (?P<background>{'|'.join(BACKGROUNDS)}) background"
)


@dataclass(frozen=True)
class Scene:
    """Content of a caption.

    `position` is a key of `ANCHORS` for one shape and None for more than one; a value outside the world is a
    `ValueError` that names the allowed values.
    """

    shape: str
    colour: str
    background: str
    count: int = 1
    position: str | None = None

    def __post_init__(self) -> None:
        for field, allowed in (("shape", SHAPES), ("colour", COLOURS), ("background", BACKGROUNDS), ("count", COUNTS)):
            value = getattr(self, field)
            if value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"a scene's {field} must be one of {choices}, got {value!r}")
        if self.colour == self.background:
            raise ValueError(f"a scene's colour and background must differ, got {self.colour!r} for both")
        if self.count == 1 and self.position not in ANCHORS:
            choices = ", ".join(ANCHORS)
            raise ValueError(f"the position of one shape must be one of {choices}, got {self.position!r}")
        if self.count > 1 and self.position is not None:
            raise ValueError(f"{self.count} shapes stand in a row and must have no position, got {self.position!r}")


def all_scenes() -> list[Scene]:
    """Every scene of the world, in a fixed order."""
    scenes = []
    for count, shape, colour, background in product(COUNTS, SHAPES, COLOURS, BACKGROUNDS):
        if colour != background:
            positions = tuple(ANCHORS) if count == 1 else (None,)
            scenes.extend(Scene(shape, colour, background, count, position) for position in positions)
    return scenes


def caption(scene: Scene) -> str:
    """The one sentence that describes `scene`."""
    noun = scene.shape if scene.count == 1 else scene.shape + "s"
    where = f" {_POSITION_WORDS[scene.position]}" if scene.position is not None else ""
    return f"{_COUNT_WORDS[scene.count]} {scene.colour} {noun}{where} on a {scene.background} background"


def parse_caption(text: str) -> Scene:
    """The scene that `text` describes; a `ValueError` for any other sentence. Case does not matter."""
    match = _CAPTION.fullmatch(text.strip().lower())
    if match is None or not (match["count"] == "a") == (match["plural"] == "") == (match["position"] is not None):
        raise ValueError(
            'a caption must read "a COLOUR SHAPE POSITION on a BACKGROUND background" or '
            f'"two|three COLOUR SHAPEs on a BACKGROUND background", got {text!r}; '
            f"colours: {', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}; "
            f"positions: {', '.join(_POSITION_WORDS.values())}; backgrounds: {', '.join(BACKGROUNDS)}"
        )
    counts = {word: count for count, word in _COUNT_WORDS.items()}
    positions = {words: position for position, words in _POSITION_WORDS.items()}
    position = positions[match["position"]] if match["position"] else None
    return Scene(match["shape"], match["colour"], match["background"], counts[match["count"]], position)


def shape_distance(shape: str, x: np.ndarray, y: np.ndarray, area: float) -> np.ndarray:
    """Signed distance to the outline of `shape`, positive inside, in the unit of `x` and `y`.

    The shape has the given area and its centre of area at the origin; the triangle is equilateral, its tip
    up (y points down). Near corners it is a bound on the distance, which is enough for drawing and fitting.
    """
    if shape == "circle":
        return math.sqrt(area / math.pi) - np.hypot(x, y)
    if shape == "square":
        return math.sqrt(area) / 2 - np.maximum(np.abs(x), np.abs(y))
    inradius = math.sqrt(area / (3 * math.sqrt(3)))
    return inradius - np.maximum(y, math.sqrt(0.75) * np.abs(x) - 0.5 * y)


def draw(scene: Scene, size_px: int, rng: np.random.Generator) -> np.ndarray:
    """A picture of `scene`, uint8 [size_px, size_px, 3], with anti-aliased edges.

    `rng` moves the shapes a little and varies their size: two calls draw two pictures of the same caption.
    """
    radius = rng.uniform(*RADIUS[scene.count])
    if scene.position is not None:
        places, jitter = [ANCHORS[scene.position]], (POSITION_JITTER, POSITION_JITTER)
    else:
        places, jitter = [(x, 0.5) for x in ROW_X[scene.count]], ROW_JITTER
    centers = np.array(places) + rng.uniform(-1, 1, size=(scene.count, 2)) * jitter
    grid = np.arange(size_px) + 0.5
    coverage = np.zeros((size_px, size_px))
    for center_x, center_y in centers * size_px:
        distance = shape_distance(
            scene.shape, grid[None, :] - center_x, grid[:, None] - center_y, math.pi * (radius * size_px) ** 2
        )
        coverage = np.maximum(coverage, np.clip(distance + 0.5, 0, 1))
    colour, background = np.array(RGB[scene.colour]), np.array(RGB[scene.background])
    return np.rint(background + coverage[..., None] * (colour - background)).astype(np.uint8)
