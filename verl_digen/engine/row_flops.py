# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a trained row by prompt length: counted from the engine's own layers, never measured.

- Useful work only: a forward and a backward. Recomputation and forwards of other policies are left out, so that a
  setting that adds work does not look like speed.
- Rows of a batch are counted with the mean length of their prompts, and with as many images as every prompt of the
  model has (`ModelSpec.num_images`), at the size that `digen.sampling` asks for.

Invariant (tests/engine/test_build.py): the forward counted is the checkpoint's network's, whatever wraps it.
"""

from __future__ import annotations

from torch import nn

from verl_digen.config import SamplingConfig
from verl_digen.models.base import DiffusionModel
from verl_digen.models.flops import Flops, forward_flops
from verl_digen.sampling.requests import planned_geometry


class RowFlops:
    """Args:
    module: the engine's module, in its wrappers.
    is_frozen: True if its weights are frozen under an adapter.
    """

    def __init__(self, model: DiffusionModel, module: nn.Module, sampling: SamplingConfig, *, is_frozen: bool):
        self._model, self._module, self._sampling, self._is_frozen = model, module, sampling, is_frozen
        self._known: dict[int, Flops] = {}
        """FLOPs by number of prompt tokens."""

    def metrics(self, prompt_tokens: float) -> dict[str, float]:
        """`row_forward_flops` and `row_training_flops` of rows with `prompt_tokens` tokens per prompt on average."""
        flops = self._of(round(prompt_tokens))
        return {
            "row_forward_flops": flops.forward,
            "row_training_flops": flops.training(is_frozen=self._is_frozen, recomputed=0.0),
        }

    def _of(self, num_tokens: int) -> Flops:
        if num_tokens not in self._known:
            self._known[num_tokens] = forward_flops(
                self._model,
                self._module,
                planned_geometry(self._sampling, self._model.spec.num_images[0]),
                num_tokens,
                is_guided=self._sampling.true_cfg_scale != 1.0,
            )
        return self._known[num_tokens]
