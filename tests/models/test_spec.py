# SPDX-License-Identifier: Apache-2.0
"""Every model's `ModelSpec` against its diffusers pipeline, and against the network of its tiny checkpoint.

Config keys are compared in tests/plan/test_parts.py, FLOPs in tests/plan/test_flops.py, LoRA targets in
test_parity.py, and vLLM-Omni's classes in tests/vllm_omni.
"""

import ast
import gc
import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import diffusers
import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
import transformers
from torch import nn

from tests.models.cases import CPU, Loaded
from tests.tiny_models import build_tiny
from verl_digen.models import MODELS, load_model, model_class
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import NUM_DRAWN, RANDOM_MARKER, RANDOM_STD, draw_weight
from verl_digen.models.locate import HUB_ID, locate, locate_configs, locate_index
from verl_digen.models.spec import Tokens
from verl_digen.tools.plan.networks import ENCODERS, Part, count_parts


def test_a_pipeline_that_needs_a_newer_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"transformers": "5.9.0", "diffusers": "0.40.0"}
    monkeypatch.setattr("verl_digen.models.version", found.__getitem__)
    with pytest.raises(ValueError, match=r"transformers must be >=5.10 for LTX2Pipeline, got '5.9.0'; pip install '"):
        model_class("LTX2Pipeline")
    with pytest.raises(ValueError, match=r"diffusers must be >=0.41 for QwenImage21Pipeline, got '0.40.0'; pip"):
        model_class("QwenImage21Pipeline")
    assert model_class("QwenImagePipeline")


@pytest.mark.parametrize("pipeline", MODELS)
def test_a_spec_names_parts_and_arguments_of_the_pipeline(pipeline: str) -> None:
    found = model_class(pipeline)
    assert issubclass(found, DiffusionModel) and not found.__abstractmethods__
    spec, theirs = found.spec, getattr(diffusers, pipeline)
    parts = inspect.signature(theirs.__init__).parameters
    assert {"scheduler", "transformer", "vae"} <= set(spec.components) <= parts.keys()
    assert spec.transformer in str(parts["transformer"].annotation)
    assert spec.selftest.keys() <= inspect.signature(theirs.__call__).parameters.keys()
    assert set(spec.freed) <= {part for part in spec.components if part.startswith("text_encoder")}
    assert spec.title and HUB_ID.fullmatch(spec.example)


@pytest.mark.parametrize("pipeline", MODELS)
def test_the_recording_mixin_is_where_the_spec_says(pipeline: str) -> None:
    """Without importing it: it imports vLLM-Omni."""
    serving = model_class(pipeline).spec.vllm_omni
    if serving is None:
        return
    module, _, name = serving.mixin.partition(":")
    found = find_spec(module, "verl_digen.rollout.vllm_omni")
    assert found is not None and found.origin is not None
    assert name in {
        node.name for node in ast.parse(Path(found.origin).read_text()).body if isinstance(node, ast.ClassDef)
    }


def test_every_pattern_of_the_flops_layout_counts_for_a_layer(loaded: Loaded) -> None:
    layout = loaded.model.spec.flops
    layers = [
        name
        for name, module in loaded.transformer.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
    ]
    assert any(name == layout.patch or name.endswith(f".{layout.patch}") for name in layers)
    for rules, among in (
        (layout.streams, layers),
        (layout.attention, [name for name in layers if name.endswith("to_q")]),
    ):
        patterns = [pattern for pattern, *_ in rules]
        first = {next((pattern for pattern in patterns if re.search(pattern, name)), None) for name in among}
        assert first >= set(patterns), f"{set(patterns) - first} is found in no layer before another pattern is"
        assert {tokens for _, *row in rules for tokens in row} <= set(get_args(Tokens))
    assert layout.attention[-1][0] == "", "every attention counts"


def test_layers_without_an_adapter_in_vllm_omni_are_default_targets(loaded: Loaded) -> None:
    spec = loaded.model.spec
    if spec.vllm_omni is not None and spec.vllm_omni.unadapted is not None:
        names = [name for name, _ in loaded.transformer.named_modules() if spec.vllm_omni.unadapted in name]
        assert any(name.endswith(f".{target}") for name in names for target in spec.lora_targets)


@pytest.mark.long
def test_an_encoder_keeps_the_parameters_that_the_plan_counts(loaded: Loaded) -> None:
    """All parameters of the checkpoint's encoders, less `ModelSpec.freed`."""
    before = _networks()
    encode = loaded.model.load_encoder(torch.float32, CPU)
    kept = sorted(_num_params(network) for network in _networks() - before)
    counts = {name: part.num_params for name, part in _parts(loaded, as_loaded_by_us=True).items()}
    assert kept == sorted(number for part, number in counts.items() if part.startswith(ENCODERS))
    whole = {name: part.num_params for name, part in _parts(loaded, as_loaded_by_us=False).items()}
    assert {part for part in counts if counts[part] < whole[part]} == set(loaded.model.spec.freed)
    assert callable(encode)  # keeps the networks alive until here


def _parts(loaded: Loaded, *, as_loaded_by_us: bool) -> dict[str, Part]:
    return count_parts(loaded.model, torch.float32, as_loaded_by_us=as_loaded_by_us)


def _networks() -> set[transformers.PreTrainedModel]:
    """All whole text encoders in this process; the parts of one are not counted again."""
    gc.collect()
    found = {value for value in gc.get_objects() if issubclass(type(value), transformers.PreTrainedModel)}
    return found - {part for network in found for part in network.modules() if part is not network}


def _num_params(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# -- networks of a published size whose weights are drawn where they are loaded ------------------------------
@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A checkpoint whose transformer has a config and no weights."""
    folder = tmp_path / "drawn"
    build_tiny("sd3", folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    (folder / "transformer" / RANDOM_MARKER).touch()
    return folder


def test_every_process_draws_the_same_network_without_a_file_of_weights(drawn: Path):
    one, other = (load_model(drawn).load_transformer(torch.bfloat16) for _ in range(2))
    assert not any(tensor.is_meta for tensor in (*one.parameters(), *one.buffers()))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert {parameter.dtype for parameter in one.parameters()} == {torch.bfloat16}
    values = dict(one.named_parameters())
    assert values["norm_out.linear.bias"].eq(0).all() and values["transformer_blocks.0.attn.to_q.bias"].eq(0).all()
    weight = values["transformer_blocks.0.attn.to_q.weight"].float()
    assert abs(weight.std().item() / RANDOM_STD - 1) < 0.1 and abs(weight.mean().item()) < RANDOM_STD / 5


def test_tensors_of_one_shape_differ_and_one_longer_than_what_is_drawn_repeats_it():
    shape = torch.Size((8, 16))
    assert not torch.equal(draw_weight("a.weight", shape, torch.float32), draw_weight("b.weight", shape, torch.float32))
    long = draw_weight("a.weight", torch.Size((NUM_DRAWN + 5, 1)), torch.float32).flatten()
    assert torch.equal(long[:5], long[NUM_DRAWN:]) and not torch.equal(long[:5], long[5:10])
    assert draw_weight("norm.weight", torch.Size((4,)), torch.float32).eq(1).all()


COMMIT = "0" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache that holds the repository acme/tiny, and no network."""
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    (snapshot / "transformer").mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (snapshot / "transformer" / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_repository_of_the_hub_is_found_in_its_cache(hub_cache):
    assert locate("acme/tiny") == hub_cache
    assert locate_index("acme/tiny") == locate_configs("acme/tiny") == hub_cache


def test_only_what_the_index_names_is_downloaded(hub_cache, monkeypatch):
    """FLUX.1's repository has its 24 GB a second time in one file, SD3.5's its encoders in fp16."""
    index = {"_class_name": "P", "transformer": ["diffusers", "T"], "image_encoder": [None, None], "boundary": 0.5}
    (hub_cache / "model_index.json").write_text(json.dumps(index))
    published = [
        *("model_index.json", "flux1-dev.safetensors", "image_encoder/model.safetensors", "transformer/notes.md"),
        *("transformer/config.json", "transformer/model.safetensors", "transformer/model.fp16.safetensors"),
    ]
    asked = []

    def snapshot(repository, *, allow_patterns, ignore_patterns):
        filters = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        asked.append(list(huggingface_hub.utils.filter_repo_objects(published, **filters)))
        return str(hub_cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    locate("acme/tiny")
    locate_configs("acme/tiny")
    with_weights = ["model_index.json", "transformer/config.json", "transformer/model.safetensors"]
    assert asked == [with_weights, ["model_index.json", "transformer/config.json"]]


def test_a_folder_wins_over_a_repository_of_the_same_name(hub_cache, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert locate("acme/tiny") == Path("acme/tiny")


def test_a_name_that_is_neither_is_an_error_with_the_remedy(hub_cache):
    with pytest.raises(ValueError, match=r"model\.path must be .* got 'acme/absent'.*HF_TOKEN"):
        locate("acme/absent")
