# SPDX-License-Identifier: Apache-2.0
"""Read prompts from files (`verl_digen.data.splits`), interpret the columns of a row (docs/data.md has the table of
them), and find prompts that are longer than the model reads."""

import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_digen.data.files import COMPRESSED, rows_of
from verl_digen.data.splits import TRAIN, resolve
from verl_digen.data.tables import dataset_rows
from verl_digen.inputs.tables import HUB, TABLE, HubName, TableImage, load_saved
from verl_digen.require import require, shown
from verl_digen.types import PromptRow

SPLIT_WORDS = {"train", "training", "test", "val", "valid", "validation", "eval", "dev", "metadata"}
"""Words of a file's name that say nothing about the source of its prompts."""
UNREADABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no tokenizer takes."""
QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]')

PAIR = ("chosen", "rejected")
"""Columns of a preference pair."""
FIXED = ("negative_prompt", "reward_model", "ground_truth", "extra_info", *PAIR)
"""Columns that always have these names."""
NAMED_BY = ("prompt_key", "reward_fn_key", "image_key")
"""Keys of `data:` that name the fields of `Columns`, in order."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns that a user may rename: `data.prompt_key`, `data.reward_fn_key` and `data.image_key`."""

    prompt: str = "prompt"
    data_source: str = "data_source"
    images: str = "images"

    @staticmethod
    def of(data: DictConfig) -> "Columns":
        """The names in the `data:` section. ValueError for an empty or equal one, or one that has another meaning."""
        names = [data[key] for key in NAMED_BY]
        for key, name in zip(NAMED_BY, names, strict=True):
            require(
                isinstance(name, str) and name.strip() != "" and name not in FIXED and names.count(name) == 1,
                f"data.{key} must be the name of a column without another meaning",
                name,
                "leave it out, or rename the column",
            )
        return Columns(*names)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Columns of images."""
        return (self.images, *PAIR)

    @cached_property
    def known(self) -> frozenset[str]:
        """Columns with a meaning of their own; others join `extra_info`."""
        return frozenset({*FIXED, self.prompt, self.data_source, self.images})


VERLS_NAMES = Columns()


def read_prompts(files: Any, key: str = TRAIN, columns: Columns = VERLS_NAMES) -> list[PromptRow]:
    """All prompts of `files`, in order: one or several of what `verl_digen.data.splits` lists. `key`,
    `data.train_files` or `data.val_files`, says which split of a folder is read, and error messages begin with it.
    ValueError: a value that is no path; a missing, empty, unreadable or malformed file."""
    return [prompt for name in resolve(files, key) for prompt in _read_one(name, key, columns)]


def count_repeated(prompts: Sequence[PromptRow]) -> int:
    """Number of prompts that equal an earlier one in text, negative prompt, images, pair and reference."""
    known = {(row.text, row.negative, row.images, row.pair, repr(row.ground_truth)) for row in prompts}
    return len(prompts) - len(known)


def default_source(path: Path) -> str:
    """The file's name, or its folder's if the name says only which part it is: "ocr" for ocr/train.txt."""
    stem = Path(path.stem).stem if path.suffix.lower() == COMPRESSED else path.stem
    words = re.split(r"[\W_]+", stem.lower())
    return path.absolute().parent.name or stem if SPLIT_WORDS.issuperset(words) else stem


def default_ground_truth(text: str, data_source: str) -> str:
    """The prompt itself; for OCR prompts, the quoted text that the picture should show, as flow_grpo has it."""
    return quoted_text(text) or text if "ocr" in re.split(r"[\W_]+", data_source.lower()) else text


def quoted_text(text: str) -> str:
    """The first part in double quotes, straight or typographic, as it stands there; "" if there is none."""
    found = QUOTED.search(text)
    return "" if found is None else found[found.lastindex or 0]


def _read_one(name: str, key: str, columns: Columns) -> list[PromptRow]:
    kept = columns.known, columns.pictures
    if name.startswith(HUB):
        hub = HubName.parse(name, key)
        source, folder = hub.name.partition("/")[2], Path.cwd()
        remedy = "check its name, subset and split, and that this machine reaches the hub"
        rows = dataset_rows(hub.load, str(hub), name, key, *kept, remedy)
    else:
        path = Path(os.path.expanduser(name))
        source, folder = default_source(path), path.absolute().parent
        if path.is_dir():
            saved = str(path.absolute())
            rows = dataset_rows(partial(load_saved, saved), saved, name, key, *kept, "save the dataset again")
        else:
            rows = rows_of(path, key, *kept)
    prompts = []
    for place, row in rows:
        row = {columns.prompt: row} if isinstance(row, str) else row
        prompts.append(_to_prompt(row, columns, source, folder, f"{key}: {place}", place))
    if not prompts:
        raise ValueError(f"{key} must name files with at least one prompt, but {name!r} is empty; add prompts")
    return prompts


def _to_prompt(
    row: dict[str, Any], columns: Columns, file_source: str, folder: Path, where: str, place: str
) -> PromptRow:
    source = row.get(columns.data_source)
    if not (source is None or (isinstance(source, str) and source.strip())):
        raise ValueError(
            f"{where} must have a {columns.data_source} that is a string, got {shown(source)}; write a name, or leave "
            "the column out"
        )
    source = source or file_source
    text, negative = _texts(row, columns.prompt, where)
    truth = _truth(row, where)
    extra_info = {name: value for name, value in row.items() if name not in columns.known}
    return PromptRow(
        text=text,
        data_source=source,
        ground_truth=default_ground_truth(text, source) if truth is None else truth,
        negative=negative,
        extra=extra_info | _mapping(row, "extra_info", where),
        images=_images(row.get(columns.images), columns.images, folder, where),
        pair=_pair(row, folder, where),
        place=place,
    )


def _texts(row: dict[str, Any], column: str, where: str) -> tuple[str, str | None]:
    """The prompt, and the negative prompt."""
    if column not in row:
        raise ValueError(
            f"{where} must have a column {column!r}, got columns {shown(sorted(map(str, row)))}; rename the column "
            "that holds the text, or set data.prompt_key to its name"
        )
    text = _text(row[column])
    if text is None or not text.strip():
        raise ValueError(
            f"{where} must have a {column} that is a non-empty string or a chat with a user message, got "
            f"{shown(row[column])}; fill it in or remove the row"
        )
    negative = _text(row.get("negative_prompt"))
    if negative is None and row.get("negative_prompt") is not None:
        raise ValueError(
            f"{where} must have a negative_prompt that is a string, got {shown(row['negative_prompt'])}; write a "
            "string, or leave the column out"
        )
    for name, value in ((column, text), ("negative_prompt", negative or "")):
        if UNREADABLE.search(value):
            raise ValueError(
                f"{where} must have a {name} without NUL characters and halves of surrogate pairs, got {shown(value)}; "
                "remove them, or save the file as UTF-8 if it is in another encoding"
            )
    return text, negative


def _truth(row: dict[str, Any], where: str) -> Any:
    """The reference that the row gives; None where it gives none."""
    nested, own = _mapping(row, "reward_model", where).get("ground_truth"), row.get("ground_truth")
    if nested is not None and own is not None and nested != own:
        raise ValueError(
            f"{where} must have one reference, got ground_truth {shown(own)} and reward_model.ground_truth "
            f"{shown(nested)}; leave one out"
        )
    return own if nested is None else nested


def _images(value: Any, column: str, folder: Path, where: str) -> tuple[str, ...]:
    """References to a row's images: absolute paths of files that are there, and places in tables."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) and one.strip() for one in given):
        raise ValueError(
            f"{where} must have {column} that are a path or a list of paths, got {shown(value)}; write pictures to "
            "files, or leave the column out"
        )
    return tuple(_reference(one, column, folder, where) for one in given)


def _reference(given: str, column: str, folder: Path, where: str) -> str:
    if re.match(r"data:|(?!hf:)\w+://", given):
        raise ValueError(
            f"{where} must have {column} that are files, got {shown(given)}; write the pictures to files, and their "
            "paths here"
        )
    if given.startswith(TABLE):
        try:
            image = TableImage.parse(given).relative_to(folder)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        reference, place = str(image), image.source
        is_there = place.startswith(HUB) or Path(place).exists()
    else:
        reference = place = str(folder / os.path.expanduser(given))
        is_there = os.path.isfile(place)  # False, too, for a name that is too long
    if not is_there:
        raise ValueError(
            f"{where} must have {column} that are files, but {place[-80:]!r} is missing; paths "
            f"are relative to {str(folder)!r}"
        )
    return reference


def _pair(row: Mapping[str, Any], folder: Path, where: str) -> tuple[str, ...]:
    """References to the chosen and the rejected picture; () if the row has neither."""
    found = [_images(row.get(column), column, folder, where) for column in PAIR]
    numbers = [len(paths) for paths in found]
    if numbers not in ([0, 0], [1, 1]):
        raise ValueError(
            f"{where} must have one picture in each of the columns {' and '.join(PAIR)}, or in none, got {numbers[0]} "
            f"and {numbers[1]}; give both, or leave both out"
        )
    return tuple(path for paths in found for path in paths)


def _mapping(row: Mapping[str, Any], column: str, where: str) -> dict[str, Any]:
    value = row.get(column)
    if not (value is None or isinstance(value, dict)):
        raise ValueError(
            f"{where} must have an object as {column}, got {shown(value)}; write an object of names and values, or "
            "leave the column out"
        )
    return value or {}


def _text(value: Any) -> str | None:
    """The text of a string, or of the last user message of a chat list; None where there is none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    contents = [turn.get("content") for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
    content = contents[-1] if contents else None
    if isinstance(content, list):  # parts, as in a chat with several modalities
        is_text = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in content]
        return "".join(part["text"] for part in content) if content and all(is_text) else None
    return content if isinstance(content, str) else None


SURELY_SHORT_BYTES = 200
"""A prompt this long fits every model: a token is a byte or more, and none reads fewer than 256. (Eight quotations in
one can be too much for HunyuanVideo 1.5, whose encoder then says so.)"""

PromptCheck = Callable[[str], None]
"""Raises ValueError for a text that is longer than the model reads."""


@dataclass(frozen=True)
class TooLong:
    """A prompt that the model would not read to its end."""

    prompt: PromptRow
    reason: str


def find_too_long(prompts: Iterable[PromptRow], load_check: Callable[[], PromptCheck]) -> list[TooLong]:
    """The prompts that are too long, or have a negative prompt that is. `load_check` loads tokenizers: it is called at
    most once, and only if a prompt is not surely short."""
    check = cache(load_check)

    @cache
    def reason(text: str) -> str:
        if len(text.encode()) > SURELY_SHORT_BYTES:
            try:
                check()(text)
            except ValueError as error:
                return str(error)
        return ""

    found = ((prompt, reason(prompt.text) or reason(prompt.negative or "")) for prompt in prompts)
    return [TooLong(prompt, why) for prompt, why in found if why]


def without(prompts: Sequence[PromptRow], too_long: Sequence[TooLong]) -> list[PromptRow]:
    """Prompts that are not too long."""
    dropped = {id(one.prompt) for one in too_long}
    return [prompt for prompt in prompts if id(prompt) not in dropped]


def describe_dropped(key: str, too_long: Sequence[TooLong], num_prompts: int) -> str:
    """One sentence on the prompts of `key` that were dropped, the first of them by its place."""
    first = too_long[0]
    return (
        f"data.filter_overlong_prompts=true: {len(too_long)} of {num_prompts} prompts of {key} are left out, the first "
        f"in {first.prompt.place}: {first.reason}"
    )
