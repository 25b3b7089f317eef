# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1's forward against diffusers' own, what is transparent, and a distilled checkpoint's schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from torch import Tensor

from tests.models.cases import CPU, PROMPTS, Loaded, changed, record_inputs
from verl_digen.models import load_model
from verl_digen.types import Geometry

WIDE = Geometry(32, 96)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.tiny("qwen_image21", tmp_path_factory.mktemp("qwen_image21") / "m")


def velocity_of(loaded: Loaded, network: Any, prompts: tuple[str, ...], start: Tensor) -> Tensor:
    sigmas = torch.tensor([0.9, 0.2])[: len(start)]
    return loaded.model.velocity(network, start, sigmas, loaded.encode(prompts), None, 1.0, WIDE)


@pytest.mark.parametrize("recomputes", [False, True])
def test_velocity_and_gradients_are_those_of_the_networks_own_forward(loaded: Loaded, recomputes: bool) -> None:
    """Two rows of one prompt, at different sigmas."""
    start = torch.randn(2, *loaded.model.latent_shape(WIDE), generator=torch.Generator().manual_seed(0))
    network: Any = loaded.model.load_transformer(torch.float32)
    if recomputes:
        network.enable_gradient_checkpointing()
    calls, stop = record_inputs(network)
    found = velocity_of(loaded, network, PROMPTS[:1] * 2, start)
    found.square().sum().backward()
    num_tokens = start.shape[1]
    stop()

    own: Any = QwenImage21Transformer2DModel.from_pretrained(loaded.path / "transformer")
    (call,) = calls
    num_text = call["encoder_hidden_states"].shape[1]
    slots = torch.arange(num_text + num_tokens // 4) >= num_text  # four tokens each, of the picture
    expected = own(**call, img_mask=slots.expand(2, -1), return_dict=False)[0][:, -num_tokens:]
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(network.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_prompts_length_places_its_own_picture_alone(loaded: Loaded) -> None:
    """Beside a longer prompt, whose length diffusers' network would take for both, and without the padding."""
    start = torch.randn(2, *loaded.model.latent_shape(WIDE), generator=torch.Generator().manual_seed(0))
    together = velocity_of(loaded, loaded.transformer, PROMPTS, start)
    alone = velocity_of(loaded, loaded.transformer, PROMPTS[:1], start[:1])
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)


def test_what_is_transparent_becomes_white(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded.model.load_decoder(torch.float32, CPU)
    colours = torch.tensor([-1.0, 0.0, 1.0]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 2, 2)
    opacity = torch.tensor([-3.0, -1.0, 0.0, 1.0]).view(1, 1, 1, 2, 2)
    (vae,) = decoder.modules
    monkeypatch.setattr(vae, "decode", lambda latents, return_dict: [torch.cat([colours, opacity], dim=1)])
    pixels = decoder(torch.zeros(1, 4, 4), Geometry(32, 32)).pixels[0].flatten(0, 1)
    assert pixels.tolist() == [[255, 255, 255], [255, 255, 255], [128, 191, 255], [0, 128, 255]]


def test_a_distilled_checkpoints_sigmas_are_its_own(loaded: Loaded, tmp_path: Path) -> None:
    """Numbers of its index, without a shift."""
    own = [1.0, 0.9, 0.4]
    copy = changed(loaded.path, tmp_path / "m", "model_index.json", {"sample_sigmas": own})
    no_shift = {"use_dynamic_shifting": False, "shift_terminal": None}
    model = load_model(changed(copy, tmp_path / "n", "scheduler/scheduler_config.json", no_shift))
    assert model.sigmas(3, WIDE).tolist() == pytest.approx([*own, 0.0])
    with pytest.raises(
        ValueError, match=r"num_steps and val_num_steps must be 3 for this Qwen-Image-2\.1 .* got 8; set"
    ):
        model.sigmas(8, WIDE)


def test_a_network_whose_prompts_follow_the_pictures_sigma_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    copy = changed(loaded.path, tmp_path / "m", "transformer/config.json", {"causal_condition": False})
    with pytest.raises(ValueError, match=r"a transformer with causal_condition=true for Qwen-Image-2\.1, got false in"):
        load_model(copy)
