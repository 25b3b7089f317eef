# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a model file loads beside its example and that differ in more than sizes: with eta = 0 our sampler
gives the latents of their pipelines."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel

from tests.models.cases import CASES, Loaded, changed
from tests.models.test_parity import initial, requests, sample
from tests.sampling.runs import close
from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.models.flux import Flux
from verl_digen.models.tiny.parts import draw_weights


def large_of(path: Path) -> None:
    """Stable Diffusion 3.5 large (-turbo): no block has a second attention."""
    config = SD3Transformer2DModel.load_config(path / "transformer")
    network = SD3Transformer2DModel.from_config({**config, "dual_attention_layers": []})  # type: ignore[dict-item]
    draw_weights(network)
    network.save_pretrained(path / "transformer")


def distilled_of(path: Path) -> None:
    """FLUX.2 [klein] 4B and 9B: the pipeline ignores guidance."""
    index = path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))


@pytest.mark.parametrize(("name", "change", "given"), [("sd3", large_of, 1.0), ("flux2_klein", distilled_of, 4.0)])
def test_a_variant_is_its_own_pipeline(tmp_path, name, change, given):
    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(0)
    change(build_tiny(name, tmp_path / "c"))
    loaded = Loaded(case, tmp_path / "c")
    geometry = case.sizes[0]
    _, latents = sample(loaded, requests(geometry, 1.0))
    more = {} if given == 1.0 else {"guidance_scale": given}
    close(latents, loaded.run_pipeline(geometry, 1.0, initial(loaded.model, geometry), **more))
    assert loaded.model.takes_guidance == (given == 1.0)


@pytest.mark.parametrize(("is_shifted", "tokens"), [(False, 256), (True, 512)])
def test_a_flux_without_guidance_reads_a_schnells_tokens_only_with_its_schedule(tmp_path, is_shifted, tokens):
    """A dev whose distilled guidance was trained away has dev's schedule."""
    path = build_tiny("flux_schnell", tmp_path / "c")
    schedule = {"use_dynamic_shifting": is_shifted}
    model = load_model(changed(path, tmp_path / "m", "scheduler/scheduler_config.json", schedule))
    assert isinstance(model, Flux) and model.default_embedded_guidance is None
    assert model.max_text_tokens == model.spec.condition.num_tokens == tokens
