# SPDX-License-Identifier: Apache-2.0
"""Networks whose tokens can be split over devices: what a size must divide, and the names in the plans.

Velocities and gradients of split networks are in tests/engine/test_sequence.py.
"""

import re
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from tests.models.cases import Loaded
from verl_digen.models import MODELS, model_class
from verl_digen.models.sequence import TRAINER_KEY, check_sequence, own_share, pad_prompts
from verl_digen.types import Geometry

KEY = f"{TRAINER_KEY} must"


def test_every_network_that_diffusers_can_split_is_split() -> None:
    for pipeline in MODELS:
        spec = model_class(pipeline).spec
        has_plan = getattr(diffusers, spec.transformer)._cp_plan is not None
        own_plan = spec.sequence is not None and spec.sequence.plan is not None
        # images of any number of tokens, and sound, which the plan does not know
        may_not_divide = spec.image_sizes not in ("", "qwen_image_edit") or bool(spec.audio_parts)
        assert (spec.sequence is not None) == ((has_plan or own_plan) and not may_not_divide), pipeline
        assert not (has_plan and own_plan), f"diffusers has a plan for {pipeline} now"


def test_a_plan_names_modules_of_the_network(loaded: Loaded) -> None:
    layout, network = loaded.model.spec.sequence, loaded.transformer
    if layout is None:
        return
    for expert in loaded.model.experts if len(loaded.model.experts) > 1 else [""]:
        part: Any = network.get_submodule(expert)
        plan = layout.plan or part._cp_plan
        assert {*layout.unsplit} < {*plan}
        for name in plan:
            part.get_submodule(name.replace("*", "0"))


def test_one_device_runs_every_network_of_any_size(loaded: Loaded) -> None:
    check_sequence(loaded.model, 1, loaded.case.sizes[0])


def test_a_size_must_divide_heads_and_tokens(loaded: Loaded) -> None:
    model, geometry = loaded.model, loaded.case.sizes[0]
    if model.spec.sequence is None:
        message = f"{KEY} be 1 for {model.spec.title}, whose network ({model.spec.transformer}) has no plan"
        with pytest.raises(ValueError, match=re.escape(message)):
            check_sequence(model, 2, geometry)
        return
    check_sequence(model, 2, geometry)
    with pytest.raises(ValueError, match=r"divide the \d+ attention heads .*, got 3; choose one of 1, 2$"):
        check_sequence(model, 3, geometry)


def test_a_size_must_divide_the_tokens_of_any_image(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have sides of multiples of 32 px, so the smallest has 4 tokens."""
    model = loaded.model
    if model.spec.sequence is None or not loaded.case.has_images:
        return
    monkeypatch.setattr(model, "read_network_config", lambda folder: {"num_attention_heads": 8})
    check_sequence(model, 4, Geometry(128, 128))
    with pytest.raises(ValueError, match=r"divide the 4 tokens of the smallest image .*, got 8; choose one of 1, 2, 4"):
        check_sequence(model, 8, Geometry(128, 128))


def test_a_video_whose_tokens_do_not_divide_is_refused(loaded: Loaded) -> None:
    model = loaded.model
    if model.spec.sequence is None or not loaded.case.is_video:
        return
    side = loaded.case.px_multiple
    assert model.num_tokens(Geometry(side, side, 1)) == 1
    with pytest.raises(ValueError, match=re.escape(f"{KEY} divide the 1 tokens of 1 frame(s) of {side} x {side} px")):
        check_sequence(model, 2, Geometry(side, side, 1))


def test_prompts_are_padded_only_where_their_length_does_not_divide() -> None:
    text = torch.ones(2, 5, 3)
    assert pad_prompts(text, None, 5) == (text, None) and pad_prompts(text, None, 1) == (text, None)
    padded, mask = pad_prompts(text, None, 4)
    assert padded.shape == (2, 8, 3) and padded.sum() == text.sum()
    assert mask is not None and mask.tolist() == [[True] * 5 + [False] * 3] * 2
    given = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    padded, mask = pad_prompts(text, given, 2)
    assert mask is not None and mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]] and mask.dtype == given.dtype


def test_a_network_that_is_not_split_keeps_every_token() -> None:
    text, mask = torch.ones(1, 5, 2), torch.ones(1, 5)
    assert own_share(SimpleNamespace(sequence_mesh=None), text, mask) == (text, mask)
