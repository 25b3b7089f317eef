# SPDX-License-Identifier: Apache-2.0
"""Files to score, as pixels, and the prompt of each: the one of `--prompt`; of `--prompts FILE` the row whose
`file_name` is the end of its path, or without this column the row at its place, where rows repeat n times with n files
per row; else the text file beside it, NAME.txt, or its row in a prompt file `metadata.*` in its folder."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence

from verl_digen.data.files import SUFFIXES as PROMPT_SUFFIXES
from verl_digen.data.files import decode
from verl_digen.data.prompts import default_ground_truth, read_prompts
from verl_digen.inputs.images import in_8_bits
from verl_digen.require import require
from verl_digen.reward.base import imported
from verl_digen.types import PromptRow

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
ANIMATED = ("GIF", "WEBP", "PNG")
"""Pillow's formats whose further pictures are frames: a TIFF's are pages, a JPEG's (MPO) a phone's extras."""
FILMS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
ARRAY = ".npy"
SUFFIXES = (*PICTURES, *FILMS, ARRAY)
"""Endings of files that are scored, in any case."""


def find(paths: Iterable[str]) -> list[Path]:
    """Files to score: those named, and the pictures and videos in the folders named and below, in natural order (2.png
    before 10.png). ValueError: a path is not there, is a file of another kind, or is a folder without pictures."""
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = [file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES]
            require(
                bool(inside), f"a folder must hold pictures or videos ({', '.join(SUFFIXES)})", name, "name another one"
            )
            found |= dict.fromkeys(sorted(inside, key=natural_order))
        else:
            require(path.is_file(), "files to score must exist", name, "check the path")
            rule = f"files to score must end in one of {', '.join(SUFFIXES)}"
            require(path.suffix.lower() in SUFFIXES, rule, name, "convert it")
            found[path] = None
    return list(found)


def natural_order(path: Path) -> tuple[object, ...]:
    """Sorting key by which 2.png comes before 10.png, and files before files of folders below."""
    words = [[word for word in re.split(r"([0-9]+)", part) if word] for part in path.parts]
    return (len(words), *(tuple((not w.isdecimal(), int(w) if w.isdecimal() else w) for w in part) for part in words))


def read(path: Path) -> NDArray[np.uint8]:
    """Pixels of a file, uint8 [H, W, 3], or [F, H, W, 3] for a video. ValueError if it is not what its ending says."""
    try:
        if path.suffix.lower() == ARRAY:
            return _array(path)
        return _film(path) if path.suffix.lower() in FILMS else _picture(path)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        # Pillow raises each of these for a malformed file
        raise ValueError(f"{str(path)!r} cannot be read: {str(error) or type(error).__name__}") from error


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    image = in_8_bits(ImageOps.exif_transpose(image))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _picture(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        is_film = image.format in ANIMATED
        frames = [_rgb(frame.copy()) for frame in ImageSequence.Iterator(image)] if is_film else [_rgb(image)]
    return frames[0] if len(frames) == 1 else np.stack(frames)


def _film(path: Path) -> NDArray[np.uint8]:
    cv2 = imported("cv2", f"of the video {path.name}")
    film = cv2.VideoCapture(str(path))
    frames = []
    while (found := film.read())[0]:
        frames.append(found[1][..., ::-1])
    if not frames:
        raise ValueError("no frame of it can be decoded")
    return np.ascontiguousarray(np.stack(frames))


def _array(path: Path) -> NDArray[np.uint8]:
    pixels = np.load(path, allow_pickle=False)
    require(
        pixels.ndim in (3, 4) and pixels.shape[-1] == 3 and pixels.size > 0,
        "an array must be [H, W, 3] or [F, H, W, 3]",
        tuple(pixels.shape),
        "move the channels to the end",
    )
    if pixels.dtype == np.uint8:
        return pixels
    in_range = np.issubdtype(pixels.dtype, np.floating) and bool(((pixels >= 0) & (pixels <= 1)).all())
    require(in_range, "an array must be uint8, or floats in [0, 1] without nan", str(pixels.dtype), "convert it")
    return (pixels * 255).round().astype(np.uint8)


FILE_NAME = "file_name"
"""Column that names a row's file, as in image folders of the `datasets` library."""
SOURCE = "scored"
"""Data source of prompts that are given as a text."""


def prompts_of(files: Sequence[Path], *, prompt: str | None, prompt_file: str | None) -> list[PromptRow]:
    """One row per file; files of equal prompts share `uid`, as the samples of a group do. ValueError: a file has no
    prompt, a row names no file, or the numbers of both do not agree."""
    require(prompt is None or prompt_file is None, "--prompt and --prompts exclude each other", prompt, "give one")
    if prompt is not None:
        rows = [_of_text(prompt)] * len(files)
    elif prompt_file is not None:
        rows = _from_file(files, prompt_file, "--prompts")
    else:
        rows = _beside(files)
    return [replace(row, uid=row.text, index=index) for index, row in enumerate(rows)]


def _of_text(text: str) -> PromptRow:
    return PromptRow(text, SOURCE, default_ground_truth(text, SOURCE))


def _from_file(files: Sequence[Path], prompt_file: str, key: str) -> list[PromptRow]:
    rows = read_prompts(prompt_file, key)
    named = [row for row in rows if FILE_NAME in row.extra]
    if not named:
        num_placed = len(files) if key == "--prompts" else 1  # files of a folder have no order that a person gave
        require(
            num_placed % len(rows) == 0,
            f"{key} must have one row per file, or a row per n of them, for {len(files)} files",
            f"{len(rows)} rows",
            f"add a column {FILE_NAME} that names each row's file",
        )
        each = len(files) // len(rows)
        return [row for row in rows for _ in range(each)]
    if len(named) < len(rows):
        bare = next(row for row in rows if FILE_NAME not in row.extra)
        raise ValueError(f"{key}: {bare.place} must have a {FILE_NAME}, as others of the file have; fill it in")
    by_name = {Path(str(row.extra[FILE_NAME])).parts: row for row in rows}
    told = f"{len(rows)} rows with {len(by_name)} names"
    require(len(by_name) == len(rows), f"{key} must name a file in one row", told, f"make each {FILE_NAME} different")
    return [_row_of(file, by_name, f"{key} {prompt_file}") for file in files]


def _row_of(file: Path, by_name: dict[tuple[str, ...], PromptRow], where: str) -> PromptRow:
    """The row with the longest name that the file's path ends in."""
    for start in range(len(file.parts)):
        row = by_name.get(file.parts[start:])
        if row is not None:
            return row
    raise ValueError(f"{where} must have a row for every file, none has {FILE_NAME} {file.name!r}; add it")


def _beside(files: Sequence[Path]) -> list[PromptRow]:
    found, others = dict[Path, PromptRow](), dict[Path, list[Path]]()
    for file in files:
        text = file.with_suffix(".txt")
        if text.is_file():
            found[file] = _of_text(decode(text, "the prompt of a file").strip())
        else:
            others.setdefault(file.parent, []).append(file)
    for folder, inside in others.items():
        table = _table(folder)
        if table is None:
            raise ValueError(
                f"{str(inside[0])!r} must have a prompt: there is no {inside[0].stem}.txt beside it, and no "
                "metadata.jsonl in its folder; give --prompts FILE, or --prompt TEXT (--prompt '' where the reward "
                "does not read it)"
            )
        found |= zip(inside, _from_file(inside, str(table), "the prompts of"), strict=True)
    return [found[file] for file in files]


def _table(folder: Path) -> Path | None:
    """The prompts of a folder's files; beside the folder for pictures of a run's validation."""
    paths = [folder / f"metadata{suffix}" for suffix in PROMPT_SUFFIXES if suffix != ".txt"]
    beside = folder.absolute().parent / f"{folder.absolute().name}.json"
    return next((path for path in (*paths, beside) if path.is_file()), None)
