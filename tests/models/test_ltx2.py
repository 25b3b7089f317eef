# SPDX-License-Identifier: Apache-2.0
"""LTX-2: two parts in one tensor of latents, and its sound."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.cases import CPU, Loaded, changed
from tests.models.test_parity import draw, initial, requests, sample
from verl_digen.algorithms.sde import latent_mean
from verl_digen.models import load_model
from verl_digen.models.ltx2 import LTX2, PLAIN_GUIDANCE
from verl_digen.models.ltx2_parts import connected
from verl_digen.models.pixels import SILENT
from verl_digen.require import as_typed
from verl_digen.types import Geometry

PARITY = 1e-5


@pytest.fixture(scope="module")
def ltx2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.tiny("ltx2", tmp_path_factory.mktemp("ltx2") / "m")


def model_of(ltx2: Loaded) -> LTX2:
    assert isinstance(ltx2.model, LTX2)
    return ltx2.model


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_sound_is_the_pipelines(ltx2: Loaded, scale: float) -> None:
    """Waveforms of both prompts, guided and not; pixels are compared in test_parity.py."""
    model, geometry = model_of(ltx2), ltx2.case.sizes[0]
    _, latents = sample(ltx2, requests(geometry, scale))
    made = model.load_audio_decoder(torch.float32, CPU)(latents, geometry)
    start = initial(model, geometry)
    expected = ltx2.run_pipeline(geometry, scale, start, output_type="pt", output=1)
    for audio, waveform in zip(made, expected, strict=True):
        assert audio is not None and audio.waveform.dtype == np.float32
        assert audio.rate_hz == ltx2.pipeline.vocoder.config.output_sampling_rate
        assert audio.waveform.std() > 0.1
        np.testing.assert_allclose(audio.waveform, waveform.numpy(), atol=PARITY, rtol=0)
    assert np.abs(made[0].waveform - made[1].waveform).max() > 0.1


def test_parts_are_views_that_the_vaes_read_and_give_back(ltx2: Loaded) -> None:
    model, pipeline = model_of(ltx2), ltx2.pipeline
    for geometry in ltx2.case.sizes:
        parts, latents = model.parts(geometry), draw(2, *model.latent_shape(geometry))
        video, audio = parts.tokens(latents)
        assert (video.shape[1], audio.shape[1]) == (parts.num_video, model.num_audio_tokens(geometry))
        assert video.data_ptr() == latents.data_ptr() and torch.equal(torch.cat([video, audio], 1), latents)
        vae, audio_vae = pipeline.vae, pipeline.audio_vae
        for_vae, for_audio_vae = parts.for_vae(latents, vae), parts.for_audio_vae(latents, audio_vae)
        assert for_vae.shape == (2, 8, *parts.video)
        assert for_audio_vae.shape == (2, 2, parts.num_audio, parts.mel_bins)
        back = pipeline.prepare_latents(latents=for_vae)
        torch.testing.assert_close(back, video)
        torch.testing.assert_close(pipeline.prepare_audio_latents(latents=for_audio_vae), audio)


@pytest.mark.parametrize("num_frames", [9, 17])
def test_the_sound_is_the_pipelines_as_long(ltx2: Loaded, num_frames: int) -> None:
    """Initial latents are left to the pipeline, which then chooses their number."""
    model, geometry = model_of(ltx2), Geometry(64, 64, num_frames)
    size = {"height": 64, "width": 64, "num_frames": num_frames}
    made = ltx2.pipeline("a red circle", **size, num_inference_steps=1, output_type="latent", **PLAIN_GUIDANCE)
    assert made.audio.numel() == model.num_audio_tokens(geometry) * model.latent_shape(geometry)[1]


def test_each_part_moves_the_others_velocity(ltx2: Loaded) -> None:
    """Video and sound read each other."""
    model, geometry = model_of(ltx2), ltx2.case.sizes[0]
    parts, condition = model.parts(geometry), ltx2.encode(["a red circle"])
    x = draw(1, *model.latent_shape(geometry))

    def velocity(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sigma = torch.tensor([0.5])
        return parts.tokens(model.velocity(ltx2.transformer, latents, sigma, condition, None, 1.0, geometry))

    video, audio = velocity(x)
    louder, other = x.clone(), x.clone()
    louder[:, parts.num_video :] *= 2
    other[:, : parts.num_video] *= 2
    assert (velocity(louder)[0] - video).abs().max() > 1e-3
    assert (velocity(other)[1] - audio).abs().max() > 1e-3


def test_one_log_prob_is_the_mean_over_the_elements_of_both_parts(ltx2: Loaded) -> None:
    """Shares of the tokens are the parts' weights, as the model's documentation says."""
    model, geometry = model_of(ltx2), Geometry(64, 64, 9)
    parts = model.parts(geometry)
    x = draw(1, *model.latent_shape(geometry))
    video, audio = (latent_mean(part) for part in parts.tokens(x))
    share = parts.num_video / (parts.num_video + parts.num_audio)
    torch.testing.assert_close(latent_mean(x), share * video + (1 - share) * audio)


@pytest.mark.parametrize(
    ("folder", "key", "value"),
    [
        ("transformer", "audio_in_channels", 16),
        ("transformer", "use_prompt_embeddings", False),
        ("transformer", "patch_size", 2),
        ("audio_vae", "base_channels", 16),
        ("vae", "timestep_conditioning", True),
        ("vae", "latent_channels", 16),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    ltx2: Loaded, tmp_path: Path, folder: str, key: str, value: Any
) -> None:
    configs = changed(ltx2.path, tmp_path / "m", f"{folder}/config.json", {key: value})
    told = rf"model\.path must hold a {folder} with {key}=.* for LTX-2, got {as_typed(value)} in"
    with pytest.raises(ValueError, match=told):
        load_model(configs)


def test_connectors_that_leave_padding_are_an_error() -> None:
    tokens, mask = torch.zeros(1, 3, 2), torch.tensor([[1, 1, 0]])
    parts = SimpleNamespace(
        connectors=lambda embeds, mask, padding_side: (embeds, embeds + 1, mask),
        tokenizer=SimpleNamespace(padding_side="left"),
    )
    assert connected(parts, tokens, torch.ones_like(mask))["audio"].equal(tokens[0] + 1)
    with pytest.raises(RuntimeError, match="registers in the place of padding, got a mask with zeros"):
        connected(parts, tokens, mask)


def test_models_of_pictures_are_silent() -> None:
    assert list(SILENT(torch.zeros(2, 3), Geometry(16, 16))) == [None, None]
