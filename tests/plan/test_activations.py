# SPDX-License-Identifier: Apache-2.0
"""Bytes that autograd saves for a traced row against those for a row of real tensors."""

from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.grid import IN_GRID
from verl_digen.models import load_model
from verl_digen.tools.plan import activations
from verl_digen.tools.plan.activations import fused_norms, trace_activations
from verl_digen.tools.plan.run import empty_condition

TOKENS = 5


def alone(loaded):
    """The model with only its first network."""
    model = load_model(loaded.path)
    model.experts = model.experts[:1]
    return model


def test_a_norm_saves_its_input_and_a_number_per_row():
    """Bytes that the kernel of a GPU saves; its gradient is one tensor."""
    norm, saved, rows = torch.nn.RMSNorm(64, eps=1e-6).bfloat16().requires_grad_(False), [], torch.empty(6, 64)
    rows = rows.bfloat16().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value)
    with hooks, fused_norms():
        found = norm(rows)
    assert sum(value.nbytes for value in saved if value is not norm.weight) == rows.nbytes + 6 * 4
    found.backward(torch.ones_like(found))
    assert found.shape == rows.grad.shape == rows.shape and rows.grad.dtype == rows.dtype


def trace(loaded, *, scale=1.0, trained="", has_backward=True):
    """Trace with the weights whose names end in `trained` trained, the others frozen."""
    model = alone(loaded)
    network = model.load_structure(torch.float32)
    for name, value in network.named_parameters():
        value.requires_grad_(name.endswith(trained))
    return trace_activations(
        model,
        network,
        loaded.case.sizes[0],
        empty_condition(model, TOKENS, loaded.case.sizes[0]),
        is_guided=scale > 1,
        dtype=torch.float32,
        has_backward=has_backward,
    )


traced_once = cache(trace)
"""For tests that change nothing of the trace."""


COPIED_BYTES = 2 * (512 + 5) * 24 * 4
"""The texts and images that an attention of tiny wan2.1_i2v reads for two rows."""
MODULATION_BYTES = 38 * 128 * 4
"""A modulation of each token of a row of tiny qwen_image21, which all blocks are given and autograd does not keep."""


def saved_for_real(loaded, scale) -> int:
    """Bytes of the distinct storages that autograd keeps, weights excluded."""
    model, geometry = alone(loaded), loaded.case.sizes[0]
    network = model.load_transformer(torch.float32)
    weights = {value.untyped_storage().data_ptr() for value in network.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    rows = 2 if scale > 1 else 1
    collated = model.collate([empty_condition(model, TOKENS, loaded.case.sizes[0]) for _ in range(rows)])
    if model.default_embedded_guidance is not None:
        collated["guidance"] = torch.full((rows,), model.default_embedded_guidance)
    latents = torch.zeros(rows, *model.latent_shape(geometry))
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, sdpa_kernel(SDPBackend.FLASH_ATTENTION), fused_norms():
        model.predict(network, latents, torch.full((rows,), 0.5), collated, geometry)
    return sum(kept.values())


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=IN_GRID), 3.0])
def test_a_traced_row_saves_what_a_real_one_does(loaded, scale):
    traced = traced_once(loaded, scale=scale)
    real = saved_for_real(loaded, scale)
    if scale > 1 and loaded.case.name == "wan2.1_i2v":
        # every attention cuts its input into text and image and saves copies; the trace counts the whole, too
        real += COPIED_BYTES
    if loaded.case.name == "qwen_image21":
        real += MODULATION_BYTES * (2 if scale > 1 else 1)
    assert saved(traced) == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("trained", [pytest.param("", marks=IN_GRID), "to_q.weight"])
def test_a_block_that_does_not_run_counts_as_if_it_did(loaded, trained, monkeypatch):
    replayed = traced_once(loaded, scale=3.0, trained=trained)
    monkeypatch.setattr(activations, "_kind", lambda *block: object())
    assert replayed == trace(loaded, scale=3.0, trained=trained)


def test_guidance_runs_two_rows_and_recomputation_keeps_inputs_and_one_block(loaded):
    plain, guided = traced_once(loaded), traced_once(loaded, scale=3.0)
    # not everywhere twice as much: rows share position tables
    assert inputs(plain) < inputs(guided) <= 2 * inputs(plain)
    # of two rows' texts and images, which one row reads as views; their whole is counted, too
    copies = len(plain.blocks) * 2 * COPIED_BYTES if loaded.case.name == "wan2.1_i2v" else 0
    assert saved(plain) < saved(guided) <= 2.1 * saved(plain) + copies
    assert inputs(plain) > 0 and 0 < plain.largest_block <= saved(plain)
    by_blocks = [plain.row_bytes(number) for number in range(len(plain.blocks) + 1)]
    assert by_blocks[0] == max(by_blocks)
    # where the last block fills memory most, to recompute it adds its inputs
    assert all(
        more <= fewer + block.inputs for fewer, more, block in zip(by_blocks, by_blocks[1:], plain.blocks, strict=False)
    )
    most = max(size for block in plain.blocks for size, _ in block.peaks)
    assert plain.head + inputs(plain) + most >= by_blocks[-1] >= plain.head + most
    assert by_blocks[0] >= saved(plain) - plain.tail


def inputs(activations):
    return sum(block.inputs for block in activations.blocks)


def saved(activations):
    """Bytes that autograd saves of the whole network: those of the moment after its forward."""
    return activations.moments(0)[-1].row_bytes


def test_frozen_weights_save_less(loaded):
    """Frozen weights as under an adapter: a linear layer without weight gradient saves no input."""
    assert trace(loaded, trained="to_q.weight").row_bytes(0) < traced_once(loaded).row_bytes(0)


def test_one_block_of_a_kind_gets_weights_and_a_forward_alone_has_no_moments_of_backward(loaded, monkeypatch):
    traced = traced_once(loaded, scale=3.0)
    kinds, kind_of = {}, activations._kind
    monkeypatch.setattr(activations, "_kind", lambda block, args: kinds.setdefault(block, kind_of(block, args)))
    forward = trace(loaded, scale=3.0, has_backward=False)
    given = [block for block in kinds if not any(value.is_meta for value in block.parameters())]
    assert len(given) == len(set(kinds.values()))
    assert forward.largest_block == traced.largest_block and saved(forward) == saved(traced)
    assert all(block.peaks == ((block.saved, 0),) for block in forward.blocks)
