# SPDX-License-Identifier: Apache-2.0
"""Edits of the drawn world: one attribute of a scene with one shape gets another value, asked for in one sentence.

Invariants (tests/examples/test_drawn_world.py): `parse_instruction(instruction(edit)) == edit` for every edit; `apply`
changes the named attribute and nothing else; `edits_of(scene)` has no edit that leaves the scene as it is.

Example:
    scene = parse_caption("a red circle on the left on a blue background")
    edit = parse_instruction("move it to the top")      # Edit("position", "top")
    caption(apply(scene, edit))                         # "a red circle at the top on a blue background"
"""

from dataclasses import dataclass, replace

from drawn_scenes import ANCHORS, BACKGROUNDS, COLOURS, SHAPES, Scene

VALUES: dict[str, tuple[str, ...]] = {
    "colour": COLOURS,
    "shape": SHAPES,
    "position": tuple(ANCHORS),
    "background": BACKGROUNDS,
}
"""Attribute -> values that an edit may give it."""

_SENTENCES = {
    "colour": "make it {}",
    "shape": "make it a {}",
    "position": "move it to the {}",
    "background": "make the background {}",
}


@dataclass(frozen=True)
class Edit:
    """A new value for one attribute of a scene; one outside `VALUES` is a `ValueError`."""

    attribute: str
    value: str

    def __post_init__(self) -> None:
        if self.attribute not in VALUES:
            raise ValueError(f"an edit's attribute must be one of {', '.join(VALUES)}, got {self.attribute!r}")
        if self.value not in VALUES[self.attribute]:
            choices = ", ".join(VALUES[self.attribute])
            raise ValueError(f"an edit's {self.attribute} must be one of {choices}, got {self.value!r}")


def all_edits() -> list[Edit]:
    """Every edit of the world, in a fixed order."""
    return [Edit(attribute, value) for attribute, values in VALUES.items() for value in values]


def instruction(edit: Edit) -> str:
    """The sentence that asks for `edit`."""
    return _SENTENCES[edit.attribute].format(edit.value)


def parse_instruction(text: str) -> Edit:
    """The edit that `text` asks for; a `ValueError` for any other sentence. Case does not matter."""
    known = {instruction(edit): edit for edit in all_edits()}
    found = known.get(text.strip().lower())
    if found is None:
        raise ValueError(f"an instruction must be one of {', '.join(map(repr, known))}, got {text!r}")
    return found


def apply(scene: Scene, edit: Edit) -> Scene:
    """The edited scene. A `ValueError` if the shape would have its background's colour, or for several shapes."""
    if scene.count != 1:
        raise ValueError(f"an edited scene must have one shape, got {scene.count}")
    return replace(scene, **{edit.attribute: edit.value})


def edits_of(scene: Scene) -> list[Edit]:
    """Edits that change `scene` and keep its shape visible, in a fixed order."""
    return [edit for edit in all_edits() if getattr(scene, edit.attribute) != edit.value and not _hides(scene, edit)]


def _hides(scene: Scene, edit: Edit) -> bool:
    """True where the shape would have its background's colour."""
    fixed = {"colour": scene.background, "background": scene.colour}
    return fixed.get(edit.attribute) == edit.value
