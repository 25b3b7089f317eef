# SPDX-License-Identifier: Apache-2.0
"""A user's modules outside the repository: a model, its tiny checkpoint, an objective and the name of a reward."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from verl_digen.algorithms.objectives import objective
from verl_digen.models import MODELS
from verl_digen.models.tiny import BUILDERS
from verl_digen.reward.named import BUILT_IN

NAME = "own_parts"
"""Module that registers the parts."""

REGISTERS = """
from verl_digen.algorithms.objectives import ClipConfig, register_objective
from verl_digen.algorithms.objectives.flow_grpo import clipped_ratio
from verl_digen.models import MODELS
from verl_digen.models.tiny import BUILDERS
from verl_digen.reward.named import BUILT_IN

MODELS["OwnPipeline"] = "own_model:Own"
BUILDERS["own"] = "own_model:make"
BUILT_IN["own_reward"] = "own_model:own_reward"


@register_objective("own_loss", config=ClipConfig, columns=("log_prob", "old_log_prob", "advantage"), homogeneous=True)
def own_loss(rows, config):
    return clipped_ratio(rows, config)
"""

MODEL = """
from dataclasses import replace

from diffusers import QwenImagePipeline

from verl_digen.models.qwen_image import QwenImage
from verl_digen.models.tiny import qwen_image


class Own(QwenImage):
    spec = replace(QwenImage.spec, title="a model of one's own")

    def pipeline_of(self, geometry):
        return "QwenImagePipeline"


class OwnPipeline(QwenImagePipeline):
    pass


def make():
    return OwnPipeline(**qwen_image.make().components)


def own_reward(data_source, solution_image, ground_truth, extra_info=None):
    return float(solution_image[..., 0].mean()) / 255
"""


def write_modules(folder: Path) -> None:
    """Write the modules to `folder`, which goes to PYTHONPATH."""
    (folder / f"{NAME}.py").write_text(REGISTERS)
    (folder / "own_model.py").write_text(MODEL)


def write_checkpoint(folder: Path, of_qwen_image: Path) -> Path:
    """A checkpoint of the model."""
    shutil.copytree(of_qwen_image, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "OwnPipeline"}))
    return folder


@contextmanager
def forgotten(*modules: str) -> Iterator[None]:
    """Context at whose end what was registered in it is not, and `modules` can be imported anew."""
    with ExitStack() as stack:
        for registered in (MODELS, BUILDERS, BUILT_IN, objective._OBJECTIVES):
            stack.enter_context(patch.dict(registered))
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)
