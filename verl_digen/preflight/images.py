# SPDX-License-Identifier: Apache-2.0
"""Rules for the images of prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from verl_digen.config import SamplingConfig
from verl_digen.inputs.tables import TABLE
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require

if TYPE_CHECKING:
    from verl_digen.models.base import DiffusionModel
    from verl_digen.types import PromptRow

NUM_READERS = 16
"""Files that are opened at the same time: on a network's storage, opening one is waiting."""
MAX_OPENED = 2000
PICTURE = re.compile(r"\.(png|jpe?g|webp|bmp|gif|tiff?)\b", re.IGNORECASE)
"""A picture's path in a value of a prompt's row."""
REMEDY = "or take the images out of the prompts, and set digen.sampling.planned_images=0"


def check_image_settings(run: StartConfig, model: DiffusionModel) -> None:
    """Require settings of images, that go with what the model's pipeline reads."""
    sampling = run.digen.sampling
    title, (least, most) = model.spec.title, model.spec.num_images
    if most == 0:
        why = ", which reads no images"
        run.require_values(f"for {title}", ("digen.sampling.size_from_image", False, why, "leave it out"))
    else:
        remedy = f"set it to {model.spec.image_sizes}, the rule of its pipeline"
        run.require_values(f"for {title}", ("digen.sampling.image_sizes", model.spec.image_sizes, "", remedy))
    require(
        most > 0 or sampling.image_px == SamplingConfig().image_px,
        f"digen.sampling.image_px must be left out for {title}, which reads no images",
        sampling.image_px,
        "leave it out",
    )
    require(
        sampling.planned_images is None or least <= sampling.planned_images <= most,
        f"digen.sampling.planned_images must be null or lie in [{least}, {most}] for {title}",
        sampling.planned_images,
        f"null plans {least}",
    )
    if least > 0 or sampling.planned_images:
        _check_takers(run, model)


def check_prompt_images(run: StartConfig, model: DiffusionModel, prompts: Sequence[PromptRow]) -> None:
    """Require as many images of each prompt as the pipeline reads, and a run that can make pictures of them."""
    from verl_digen.sampling.requests import geometry_of

    least, most = model.spec.num_images
    for prompt in prompts:
        require(
            least <= len(prompt.images) <= most,
            f"{prompt.place} must have {_number_of_images(least, most)} for {model.spec.title}",
            len(prompt.images),
            "choose a checkpoint that reads them, or rename the column 'images'" if prompt.images else _missing(prompt),
        )
    _check_pictures(model, prompts)
    if not any(prompt.images for prompt in prompts):
        return
    _check_takers(run, model)
    sampling = run.digen.sampling
    model.latent_shape(geometry_of(sampling, [(sampling.width_px, sampling.height_px)] * max(1, least)))


def _check_pictures(model: DiffusionModel, prompts: Sequence[PromptRow]) -> None:
    """Require pictures, of sizes that the model's pipeline takes, by the heads of their files; of pipelines without
    limits at most `MAX_OPENED`, and of a column of a table the first one. Others are checked when they are drawn."""
    from verl_digen.inputs.images import file_size_px, source_image
    from verl_digen.inputs.sizes import IMAGE_SIZES
    from verl_digen.inputs.tables import TableImage

    limits = IMAGE_SIZES[model.spec.image_sizes].limits if model.spec.num_images[1] else None
    places = {path: prompt for prompt in prompts for path in (*prompt.images, *prompt.pair)}
    files = [path for path in places if not path.startswith(TABLE)]
    parsed = {path: TableImage.parse(path) for path in reversed(places) if path.startswith(TABLE)}
    tables = {(table.source, table.column): path for path, table in parsed.items()}
    if limits is None:
        files = files[:: -(-len(files) // MAX_OPENED) or 1]

    def check(path: str) -> None:
        try:
            size = source_image(path) if path.startswith(TABLE) else file_size_px(path)
            if limits is not None and isinstance(size, tuple) and path in places[path].images:
                limits.check(*size, path)
        except ValueError as error:
            raise ValueError(f"{places[path].place}: {error}") from error

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for _ in readers.map(check, [*files, *tables.values()]):
            pass


def _check_takers(run: StartConfig, model: DiffusionModel) -> None:
    """Require a network that takes prompts with images, if ranks share rows."""
    from verl_digen.models.sequence import TRAINER_KEY

    layout, title = model.spec.sequence, model.spec.title
    if layout is not None and not layout.takes_images:
        row = TRAINER_KEY, 1, ", whose tokens are not split", f"set it to 1, {REMEDY}"
        run.require_values(f"for {title} and prompts with images", row)


def _missing(prompt: PromptRow) -> str:
    """The remedy for a prompt without images: the columns that hold paths of pictures, if there are any."""
    columns = [name for name, value in prompt.extra.items() if PICTURE.search(str(value))]
    if not columns:
        return "add them, or set data.image_key to the name of their column"
    return f"set data.image_key={' or '.join(columns)}, the column that has paths"


def _number_of_images(least: int, most: int) -> str:
    if most == 0:
        return "no images"
    return f"{least} images" if least == most else f"{least} to {most} images"
