# SPDX-License-Identifier: Apache-2.0
"""LoRA files of other trainers: a network that starts from one is that of a diffusers pipeline that loaded it."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.harness import digen_section
from tests.models.cases import NUM_STEPS, PROMPTS, Loaded
from verl_digen.engine.build import add_adapter
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.lora_file import check_lora_file

LAYERS = {
    "flux_dev": ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_out.0", "proj_out"),
    "flux2_klein": ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_out"),
    "qwen_image": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2", "img_in"),
    "qwen_image21": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.proj", "img_in"),
    "sd3": ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj", "proj_out"),
    "wan2.1": ("blocks.0.attn1.to_q", "blocks.0.ffn.net.2"),
    "z_image": ("layers.0.attention.to_q", "layers.0.feed_forward.w1"),
}
OF_WAN = {"blocks.0.attn1.to_q": "blocks.0.self_attn.q", "blocks.0.ffn.net.2": "blocks.0.ffn.2"}
FUSED = [f"transformer_blocks.0.attn.to_{part}" for part in "qkv"]
RANK, ALPHA = 4, 3.0
Matrices = dict[str, tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]
Write = Callable[[Matrices], Tensors]


def named(prefix: str, *ends: str, flat: bool = False, alpha: bool = False) -> Write:
    def write(matrices: Matrices) -> Tensors:
        found: Tensors = {}
        for layer, pair in matrices.items():
            stem = prefix + (layer.replace(".", "_") if flat else layer)
            found |= {f"{stem}.{end}.weight": value for end, value in zip(ends, pair, strict=True)}
            found |= {f"{stem}.alpha": torch.tensor(ALPHA)} if alpha else {}
        return found

    return write


def wan(matrices: Matrices) -> Tensors:
    return named("diffusion_model.", *KOHYA, alpha=True)({OF_WAN[layer]: pair for layer, pair in matrices.items()})


def flux_fused(matrices: Matrices) -> Tensors:
    """kohya's FLUX.1: queries, keys and values are one layer."""
    down = next(iter(matrices.values()))[0]
    up = torch.cat([torch.randn(down.shape[1], RANK) for _ in FUSED])
    return named("lora_unet_", *KOHYA, alpha=True)({"double_blocks_0_img_attn_qkv": (down, up)})


PEFT, KOHYA, OLD = ("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up")
DIFFUSERS = named("transformer.", *PEFT)
FILES = {
    **{(name, "diffusers"): DIFFUSERS for name in LAYERS},
    ("sd3", "old"): named("transformer.", *OLD),
    ("flux_dev", "kohya"): flux_fused,
    ("flux_dev", "kohya by diffusers' names"): named("lora_transformer_", *KOHYA, flat=True, alpha=True),
    ("flux_dev", "ai-toolkit with alpha"): named("transformer.", *PEFT, alpha=True),
    ("flux2_klein", "ai-toolkit"): named("diffusion_model.", *PEFT),
    ("qwen_image", "kohya"): named("lora_unet_", *KOHYA, flat=True, alpha=True),
    ("qwen_image", "ai-toolkit"): named("diffusion_model.", *PEFT),
    ("qwen_image", "ai-toolkit with alpha"): named("diffusion_model.", *PEFT, alpha=True),
    ("qwen_image21", "ai-toolkit"): named("diffusion_model.", *PEFT),
    ("wan2.1", "kohya"): wan,
    ("z_image", "ai-toolkit"): named("diffusion_model.", *PEFT),
}
SINCE_0_42 = {("qwen_image", "ai-toolkit with alpha")}
"""Files that older versions of diffusers read without some of their tensors."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        folder = tmp_path_factory.mktemp("lora") / "c"
        return made.get(name) or made.setdefault(name, Loaded.tiny(name, folder))

    return get


def matrices_of(loaded: Loaded, ranks: tuple[int, ...] = (RANK,)) -> Matrices:
    found, draw = {}, torch.Generator().manual_seed(0)
    for number, layer in enumerate(LAYERS[loaded.case.name]):
        width, height = loaded.transformer.get_parameter(f"{layer}.weight").shape
        rank = ranks[number % len(ranks)]
        found[layer] = (torch.randn(rank, height, generator=draw), torch.randn(width, rank, generator=draw))
    return found


def config_of(loaded: Loaded, file: Path, **more: Any) -> DiffusionModelConfig:
    return DiffusionModelConfig(path=str(loaded.path), digen=digen_section(), lora_adapter_path=str(file), **more)  # type: ignore[arg-type]


def output_of(network: torch.nn.Module, run: Callable[..., object], *given: Any, **more: Any) -> Tensor:
    """Return the network's output of the first row, of its first forward in `run`."""
    made: list[Tensor] = []
    hook = network.register_forward_hook(lambda *call: made.append(torch.as_tensor(call[-1][0][0])))
    with torch.no_grad():
        run(*given, **more)
    hook.remove()
    return made[0]


def assert_same_network(loaded: Loaded, file: Path, reference: Path | None = None) -> DiffusionModelConfig:
    """Compare a forward of one prompt with that of a diffusers pipeline that loaded the file, or `reference`."""
    config = config_of(loaded, file)
    model, size = loaded.model, loaded.case.sizes[0]
    check_lora_file(config.lora_file, model, model.load_transformer(torch.float32, meta=True))  # type: ignore[arg-type]
    pipeline = loaded.load_pipeline(torch.float32)
    pipeline.load_lora_weights(str(reference or file))
    start = torch.randn(2, *model.latent_shape(size), generator=torch.Generator().manual_seed(1))
    given = start[:1], model.sigmas(NUM_STEPS, size)[:1], loaded.encode(PROMPTS[:1]), None, 1.0, size
    adapted = add_adapter(model.load_transformer(torch.float32), config, 0).eval()
    ups = [value for name, value in adapted.named_parameters() if "lora_B" in name]
    assert all(value.count_nonzero() for value in ups), "a layer that is not in the file"
    theirs = output_of(pipeline.transformer, loaded.run_pipeline, size, 1.0, start, pipeline=pipeline)
    ours, bare = (output_of(network, model.velocity, network, *given) for network in (adapted, loaded.transformer))
    theirs = theirs[-len(ours) :]  # behind the prompt's tokens, of Qwen-Image-2.1
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))
    assert (ours - bare).abs().max() > 1e-2 * theirs.abs().max(), "the LoRA does nothing"
    return config


@pytest.mark.parametrize(("name", "form"), FILES)
def test_a_lora_in_each_form_gives_the_network_of_diffusers(tiny, tmp_path, name: str, form: str):
    if (name, form) in SINCE_0_42 and Version(diffusers.__version__) < Version("0.42"):
        pytest.skip("this diffusers drops the alphas, so the file is refused")
    loaded = tiny(name)
    save_file(FILES[name, form](matrices_of(loaded)), tmp_path / "pytorch_lora_weights.safetensors")
    config = assert_same_network(loaded, tmp_path)
    assert config.lora_rank == RANK and config.lora_alpha in (RANK, ALPHA)


def test_names_that_diffusers_does_not_convert_are_matched_with_the_network(tiny, tmp_path):
    loaded = tiny("sd3")
    matrices = matrices_of(loaded)
    scaled = {layer: (down, up * ALPHA / RANK) for layer, (down, up) in matrices.items()}
    save_file(DIFFUSERS(scaled), tmp_path / "reference.safetensors")
    for form in (
        named("lora_transformer_", *KOHYA, flat=True, alpha=True),
        named("diffusion_model.", *PEFT, alpha=True),
    ):
        save_file(form(matrices), tmp_path / "other.safetensors")
        assert_same_network(loaded, tmp_path / "other.safetensors", tmp_path / "reference.safetensors")


@pytest.mark.parametrize("alphas", [{}, {"proj_out": 6}])
def test_ranks_and_alphas_per_layer_are_the_file_s(tiny, tmp_path, alphas: dict[str, int]):
    loaded = tiny("sd3")
    matrices = matrices_of(loaded, ranks=(4, 4, 2))
    header: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"proj_out": 2},
        "alpha_pattern": alphas or {"proj_out": 4},
    }
    header["target_modules"] = [*matrices]
    saved = json.dumps({f"transformer.{key}": value for key, value in header.items()})
    save_file(DIFFUSERS(matrices), tmp_path / "x.safetensors", {"format": "pt", "lora_adapter_metadata": saved})
    config = assert_same_network(loaded, tmp_path / "x.safetensors")
    adapter = config.lora_config()
    assert (adapter.r, adapter.rank_pattern) == (4, {"^proj_out": 2})
    found = (adapter.lora_alpha, adapter.alpha_pattern)
    assert found == ((4, {"^proj_out": 2}) if alphas else (8, {"^proj_out": 4})), "one scale for all layers"


@pytest.mark.parametrize("is_rslora", [False, True])
def test_a_file_of_peft_s_folder_has_the_scale_of_the_folder(tiny, tmp_path, is_rslora: bool):
    loaded = tiny("qwen_image")
    settings = LoraConfig(r=RANK, lora_alpha=16, use_rslora=is_rslora, target_modules=["to_q"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    get_peft_model(loaded.model.load_transformer(torch.float32), settings).save_pretrained(str(folder))  # type: ignore[arg-type]
    network = loaded.model.load_transformer(torch.float32)
    folder, file = (config_of(loaded, path) for path in (folder, folder / "adapter_model.safetensors"))
    check_lora_file(file.lora_file, loaded.model, network)  # type: ignore[arg-type]
    scales = [
        {
            layer.scaling["default"]
            for layer in add_adapter(deepcopy(network), one, 1).modules()
            if isinstance(layer, LoraLayer)
        }
        for one in (folder, file)
    ]
    assert scales == [{8.0 if is_rslora else 4.0}] * 2


def edited(
    change: Callable[[Tensors], object], form: Callable[[Matrices], Tensors] = DIFFUSERS
) -> Callable[..., Tensors]:
    def write(matrices: Matrices) -> Tensors:
        found = form(matrices)
        change(found)
        return found

    return write


ONE = torch.ones(4, 4)
WRONG = {
    "of another network": (
        "qwen_image",
        lambda _: DIFFUSERS({f"blocks.{number}.attn1.to_q": (ONE, ONE) for number in range(7)}),
        r"7 of 7 layers in .* got 'blocks.0.attn1.to_q \[4, 4\] \(none there\), .*blocks.4.* and 2 more'",
    ),
    "of another size": (
        "qwen_image",
        edited(lambda found: found.update({"transformer.img_in.lora_A.weight": torch.ones(4, 9)})),
        r"1 of 3 layers .* got 'img_in \[32, 9\] \(it has \[32, 16\]\)'",
    ),
    "with text encoders": (
        "sd3",
        edited(lambda found: found.update({"text_encoder.x.lora_A.weight": ONE, "text_encoder.x.lora_B.weight": ONE})),
        r"2 of 8 tensors .* belong to text encoders, got 'text_encoder.x.lora_A.weight, ",
    ),
    "of which one half is missing": (
        "sd3",
        edited(lambda found: found.pop("transformer.proj_out.lora_B.weight")),
        r"1 of 5 names .* are of none, got 'proj_out'",
    ),
    "with DoRA": (
        "qwen_image",
        edited(lambda found: found.update({"transformer_blocks.0.attn.to_q.dora_scale": ONE})),
        r"leaves out 1 of 7 in .* got 'transformer_blocks.0.attn.to_q.dora_scale'",
    ),
    "whose alpha diffusers does not apply": (
        "flux_dev",
        lambda matrices: named("lora_unet_", *KOHYA, alpha=True)({"final_layer_linear": matrices["proj_out"]}),
        r"leaves out 1 of 3 in .* got 'lora_unet_final_layer_linear.alpha'",
    ),
    "that the converter does not know": (
        "wan2.1",
        edited(lambda found: found.update({"diffusion_model.more.lora_down.weight": ONE}), wan),
        r"that diffusers converts for WanPipeline, got .* with 7 tensors .*`state_dict` should be empty",
    ),
    "for one of two networks": ("wan2.2_a14b", lambda _: DIFFUSERS({"x": (ONE, ONE)}), "a checkpoint of 2 networks"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_does_not_fit_is_refused_with_counts_and_names(tiny, tmp_path, kind: str):
    name, write, message = WRONG[kind]
    loaded = tiny(name)
    file = tmp_path / "x.safetensors"
    written = write(matrices_of(loaded) if name in LAYERS else {})
    save_file({key: value.clone() for key, value in written.items()}, file)
    with pytest.raises(ValueError, match=rf"(?s)^actor_rollout_ref.model.lora_adapter_path must .*{message}"):
        check_lora_file(file, loaded.model, loaded.model.load_transformer(torch.float32, meta=True))


def test_a_file_that_was_cut_is_refused(tiny, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"must hold whole weight files, got .* 5 bytes"):
        config_of(tiny("sd3"), tmp_path)
