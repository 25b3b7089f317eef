# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tiny networks of every architecture."""

import pytest
import torch

from tests.tiny_models import build_tiny
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.tiny import BUILDERS
from verl_digen.rollout.fingerprint import PROMPT, fingerprint


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def loaded(request, tmp_path_factory):
    model = load_model(build_tiny(request.param, tmp_path_factory.mktemp("fingerprint") / "checkpoint"))
    (condition,) = model.load_encoder(torch.float32, torch.device("cpu"))([PromptInputs(PROMPT)])
    return model, model.load_transformer(torch.float32), condition


def test_a_tiny_step_of_any_one_network_changes_the_fingerprint_and_going_back_restores_it(loaded):
    model, transformer, condition = loaded
    first = fingerprint(model, transformer, condition)
    assert len(first) == 2 * len(model.experts) and all(abs(value) > 1e-6 for value in first)
    networks = list(transformer.children()) if len(model.experts) > 1 else [transformer]
    for number, network in enumerate(networks):
        before = {name: value.clone() for name, value in network.state_dict().items()}
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(1e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        moved = fingerprint(model, transformer, condition)
        changed = [at // 2 for at in range(len(first)) if moved[at] != first[at]]
        assert {*changed} == {number}, "of this network, and of no other"
        network.load_state_dict(before)
        assert fingerprint(model, transformer, condition) == first
