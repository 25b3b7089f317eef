# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's forward without a mask, against diffusers' own."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel

from tests.models.cases import PROMPTS, Loaded, record_inputs
from verl_digen.types import Geometry

CLIP = Geometry(32, 32, 5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.tiny("hunyuan_video", tmp_path_factory.mktemp("hunyuan_video") / "m")


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("prompts", [PROMPTS, (PROMPTS[0], PROMPTS[0])], ids=["padded", "of one length"])
def test_velocity_and_gradients_are_those_of_the_networks_own_forward(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, prompts: tuple[str, str], recomputes: bool
) -> None:
    masks = record_masks(monkeypatch)
    model = loaded.model
    start = torch.randn(2, *model.latent_shape(CLIP), generator=torch.Generator().manual_seed(0))
    network: Any = model.load_transformer(torch.float32)
    if recomputes:
        network.enable_gradient_checkpointing()
    calls, stop = record_inputs(network)
    found = model.velocity(network, start, torch.tensor([0.9, 0.2]), loaded.encode(prompts), None, 1.0, CLIP)
    found.square().sum().backward()
    stop()
    is_padded = len({*prompts}) > 1
    assert {*masks} == {is_padded}, "a block without padding has no mask, with padding it has one"

    own: Any = HunyuanVideoTransformer3DModel.from_pretrained(model.path / "transformer")
    (call,) = calls
    if call["encoder_attention_mask"] is None:
        call["encoder_attention_mask"] = torch.ones(call["encoder_hidden_states"].shape[:2])
    expected = own(**call, return_dict=False)[0]
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(network.get_parameter(name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


def record_masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record of each attention of the main blocks: whether it has a mask."""
    from diffusers.models.transformers import transformer_hunyuan_video as theirs

    found: list[bool] = []
    dispatch = theirs.dispatch_attention_fn

    def recording(query: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["attn_mask"] is not None)
        return dispatch(query, *args, **kwargs)

    monkeypatch.setattr(theirs, "dispatch_attention_fn", recording)
    return found
