# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints: their configs build networks of the published sizes."""

import json
from importlib.resources import files

import pytest
import torch

from tests.grid import IN_GRID
from verl_digen.models import load_model
from verl_digen.models.published import checkpoint_folder, repositories
from verl_digen.tools.plan.networks import count_network, count_parts
from verl_digen.types import Geometry

FOLDER = files("verl_digen") / "models" / "published"
PUBLISHED = {
    # half of the bytes in its index of bf16 weights
    "Qwen/Qwen-Image": (20_430_401_088, 0.0),
    # the same network; vLLM-Omni's page of Qwen-Image says so of all of them, model cards: 20B
    "Qwen/Qwen-Image-2512": (20_430_401_088, 0.0),
    # half of the published files' 14.2 GB in bf16
    "Qwen/Qwen-Image-2.1": (7.115e9, 0.001),
    "Qwen/Qwen-Image-2.1-Turbo": (7.115e9, 0.001),
    "Qwen/Qwen-Image-Edit": (20_430_401_088, 0.0),
    "Qwen/Qwen-Image-Edit-2509": (20_430_401_088, 0.0),
    # model cards and reports, with their rounding
    "black-forest-labs/FLUX.1-dev": (12e9, 0.02),
    "black-forest-labs/FLUX.1-Kontext-dev": (12e9, 0.02),
    # the published files in bf16: 7392 and 17316 MiB
    "black-forest-labs/FLUX.2-klein-4B": (3.876e9, 0.001),
    "black-forest-labs/FLUX.2-klein-base-4B": (3.876e9, 0.001),
    "black-forest-labs/FLUX.2-klein-9B": (9.079e9, 0.001),
    "black-forest-labs/FLUX.2-klein-base-9B": (9.079e9, 0.001),
    "stabilityai/stable-diffusion-3.5-medium": (2.5e9, 0.02),
    "stabilityai/stable-diffusion-3.5-large": (8.1e9, 0.02),
    "stabilityai/stable-diffusion-3.5-large-turbo": (8.1e9, 0.02),
    "Tongyi-MAI/Z-Image-Turbo": (6e9, 0.03),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (14e9, 0.03),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1.3e9, 0.1),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (2 * 14e9, 0.03),
    # text to video and, of 14.3 B, 2.1 B that read CLIP's tokens: calculated
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (16.4e9, 0.01),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (2 * 14e9, 0.03),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (5e9, 0.01),
    "hunyuanvideo-community/HunyuanVideo": (13e9, 0.02),
    # counted in the published weights
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": (8.327e9, 0.0001),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": (8.327e9, 0.0001),
    # the name of Lightricks' file: 19b
    "Lightricks/LTX-2": (19e9, 0.02),
}
"""Repository -> (parameters of the transformer, tables included; relative tolerance)."""
SLOW = tuple(f"stabilityai/stable-diffusion-3.5-{size}" for size in ("medium", "large", "large-turbo"))
"""Their position tables take long to compute."""
TEXT_ENCODERS = {
    "Qwen/Qwen-Image": {"text_encoder": 7.07e9},  # Qwen2.5-VL-7B without language head and vision tower
    # Qwen3-VL-8B, 8.77 B with its language head of 0.62 B and its vision tower of 0.58 B
    "Qwen/Qwen-Image-2.1": {"text_encoder": 8.14e9},
    # Qwen2.5-VL-7B without language head; the VAE's half that encodes images
    "Qwen/Qwen-Image-Edit": {"text_encoder": 7.75e9, "vae (images)": 53.6e6},
    "Qwen/Qwen-Image-Edit-2509": {"text_encoder": 7.75e9, "vae (images)": 53.6e6},
    "black-forest-labs/FLUX.1-dev": {"text_encoder": 123e6, "text_encoder_2": 4.76e9},
    # and the VAE's half that encodes images
    "black-forest-labs/FLUX.1-Kontext-dev": {"text_encoder": 123e6, "text_encoder_2": 4.76e9, "vae (images)": 34.3e6},
    "black-forest-labs/FLUX.2-klein-base-4B": {"text_encoder": 4.02e9, "vae (images)": 34.3e6},
    "black-forest-labs/FLUX.2-klein-9B": {"text_encoder": 7.57e9, "vae (images)": 34.3e6},
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": {"text_encoder": 5.68e9},
    # ViT-H-14's vision half
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": {"text_encoder": 5.68e9, "image_encoder": 631e6},
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": {"image_encoder": 428e6},
    "hunyuanvideo-community/HunyuanVideo": {"text_encoder": 7.5e9, "text_encoder_2": 123e6},
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": {
        "text_encoder": 7.071e9,
        "text_encoder_2": 219e6,
        "vae": 1.261e9,
    },
    # Gemma 3 12B without its vision tower
    "Lightricks/LTX-2": {"text_encoder": 11.77e9},
}
SIZES = {
    "LTX2Pipeline": Geometry(512, 768, 121),
    "WanPipeline": Geometry(704, 1280, 81),
    "WanImageToVideoPipeline": Geometry(480, 832, 81, ((480, 832),)),
    "HunyuanVideoPipeline": Geometry(480, 832, 81),
    "HunyuanVideo15Pipeline": Geometry(480, 832, 121),
    "HunyuanVideo15ImageToVideoPipeline": Geometry(480, 832, 121, ((480, 832),)),
}


def test_every_repository_is_compared_with_what_is_published():
    assert set(repositories()) == PUBLISHED.keys()


def test_every_part_names_its_source_and_its_check_and_is_used():
    parts = json.loads((FOLDER / "parts.json").read_text())
    assert all(part.keys() == {"source", "check", "config"} and part["source"] for part in parts.values())
    index = json.loads((FOLDER / "index.json").read_text())
    used = {part for entry in index.values() for _, part in entry["parts"].values() if part is not None}
    assert used == parts.keys()


@pytest.mark.parametrize(
    "repository", [pytest.param(one, marks=IN_GRID if one in SLOW else ()) for one in sorted(PUBLISHED)]
)
def test_networks_have_as_many_parameters_as_published(repository):
    expected, tolerance = PUBLISHED[repository]
    with checkpoint_folder(repository) as folder:
        model = load_model(folder)
        size = SIZES.get(model.pipeline, Geometry(1024, 1024))
        assert all(number > 0 for number in model.latent_shape(size))
        assert model.sigmas(len(model.index.get("sample_sigmas") or range(10)), size)[-1] == 0
        counts = count_network(model.load_transformer(torch.bfloat16, meta=True))
        assert counts.num_params + counts.exported_buffers == pytest.approx(expected, rel=tolerance)
        if repository in TEXT_ENCODERS:
            parts = count_parts(model, torch.bfloat16, as_loaded_by_us=True)
            for name, number in TEXT_ENCODERS[repository].items():
                assert parts[name].num_params == pytest.approx(number, rel=0.01)


def test_the_folder_is_gone_afterwards_and_a_local_one_stays(tiny_qwen_image):
    with checkpoint_folder("Qwen/Qwen-Image") as folder:
        assert (folder / "transformer" / "config.json").is_file()
    assert not folder.exists()
    with checkpoint_folder(str(tiny_qwen_image)) as folder:
        assert folder == tiny_qwen_image
    assert folder.is_dir()


def test_what_is_not_known_lists_what_is():
    message = r"model\.path must be a folder, or one of Qwen/Qwen-Image, .*got 'a/b'.*DIR"
    with pytest.raises(ValueError, match=message), checkpoint_folder("a/b"):
        pass
