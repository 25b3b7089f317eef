# SPDX-License-Identifier: Apache-2.0
"""All prompts of a run encoded before the transformer is loaded: `digen.rollout.encoders=before`.

Each of the trainer's devices holds the text encoders, and nothing else; then their processes end.

Invariant (tests/trainer/test_encoding.py): what an earlier run has encoded, also one that was killed, is not encoded
again.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.util import ActorPool
from tqdm import tqdm
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.config import DigenConfig
from verl_digen.config.placement import share_options
from verl_digen.config.pool_sizes import num_trainer_devices
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.rollout.network import open_checkpoint
from verl_digen.rollout.stored import StoredConditions
from verl_digen.sampling.requests import plain_request
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)

CHUNK = 16
"""Prompts of one call; progress is shown after each. A condition is written as soon as it is made."""


def encode_before(config: Any, digen: DigenConfig, datasets: Sequence[Any]) -> None:
    """Encode the prompts of `datasets` that the folder of conditions lacks, with `digen.rollout.encoders=before`.
    Called while the trainer's devices are free; shows progress on stderr. ValueError if they do not fit into
    `digen.rollout.conditions_gb`, or an image of a prompt cannot be read."""
    if digen.rollout.encoders != "before":
        return
    rows = [row for dataset in datasets for row in dataset.prompts]
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    model, dtype = load_model(model_config.local_path), PrecisionType.to_dtype(config.actor_rollout_ref.rollout.dtype)
    stored, limit = StoredConditions(digen.rollout.conditions_dir, model, dtype), digen.rollout.conditions_gb * 1e9
    paths = {stored.path(prompt): prompt for prompt in prompts_of(digen, rows)}
    missing = []
    for path, prompt in paths.items():
        if path.is_file():
            path.touch()  # the run uses it
        else:
            missing.append(prompt)
    logger.info("%d of %d prompts are in %s", len(paths) - len(missing), len(paths), stored.folder)
    kept, written, done = stored.make_room(paths.keys(), 0, limit), 0, 0
    if not missing:
        return
    chunks = [missing[first : first + CHUNK] for first in range(0, len(missing), CHUNK)]
    processes: list[Any] = [
        _Encoding.options(num_cpus=0, **share_options(1)).remote(config.actor_rollout_ref.rollout, model_config, stored)
        for _ in chunks[: num_trainer_devices(config) if get_platform().device_name != "cpu" else 1]
    ]
    encoded = ActorPool(processes).map_unordered(lambda process, chunk: process.encode.remote(chunk), chunks)
    with tqdm(total=len(missing), desc="encoding prompts", unit="prompt", mininterval=5) as bar:
        for number, num_bytes, refused in encoded:
            for error in refused:
                logger.warning("a prompt cannot be encoded, and its samples will fail: %s", error)
            bar.update(number)
            written, done = written + num_bytes, done + number
            coming = written / done * (len(missing) - done)  # conditions of a model are alike in size
            if kept + written + coming > limit:
                kept = stored.make_room(paths.keys(), coming, limit) - written
    for process in processes:
        ray.kill(process)


def prompts_of(digen: DigenConfig, rows: Iterable[PromptRow]) -> list[PromptInputs]:
    """The prompts that samples of `rows` read, each once, in their order; the negative ones too."""
    requests = (plain_request(digen, row, 0, step=0, validate=validate) for row in rows for validate in (False, True))
    return list(dict.fromkeys(inputs for request in requests for inputs in request.branches))


@ray.remote
class _Encoding:
    """The text encoders on one device, and nothing else."""

    def __init__(self, rollout_config: Any, model_config: Any, stored: StoredConditions):
        model, dtype, device = open_checkpoint(rollout_config, model_config, num_threads=0)
        self._encode, self._stored = model.load_encoder(dtype, device), stored

    def encode(self, prompts: Sequence[PromptInputs]) -> tuple[int, int, list[str]]:
        """(number of prompts, bytes written, the encoder's errors for those that it refuses)."""
        num_bytes, refused = 0, []
        for prompt in prompts:
            try:
                (condition,) = self._encode([prompt])
            except ValueError as error:
                refused.append(str(error))
            else:
                num_bytes += self._stored.write(prompt, condition)
        return len(prompts), num_bytes, refused
