# SPDX-License-Identifier: Apache-2.0
"""The table of attention kernels against diffusers' own dispatcher."""

import inspect

import pytest
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.modeling_utils import ModelMixin

from verl_digen.hardware.attention import ATTENTION_BACKENDS

REGISTRY = attention_dispatch._AttentionBackendRegistry


def test_every_kernel_of_the_table_is_one_of_diffusers():
    assert set(ATTENTION_BACKENDS) <= {backend.value for backend in AttentionBackendName}


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_a_kernel_that_refuses_masks_is_given_none(name: str):
    source = inspect.getsource(REGISTRY._backends[AttentionBackendName(name)])
    refuses = "is not supported for" in source and "`attn_mask`" in source
    counts_first_keys = "key[b, :valid_len]" in source  # wrong where padding is not last
    assert not (ATTENTION_BACKENDS[name].takes_masks and (refuses or counts_first_keys))


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_a_kernel_for_low_precision_is_one_that_diffusers_checks(name: str):
    checks = {check.__name__ for check in REGISTRY._constraints[AttentionBackendName(name)]}
    is_low = bool(checks & {"_check_qkv_dtype_bf16_or_fp16", "_check_qkv_dtype_bf16"})
    assert is_low <= (not ATTENTION_BACKENDS[name].takes_fp32)


def test_flash_attention_3_of_its_package_has_no_backward():
    source = inspect.getsource(attention_dispatch)
    assert '@_custom_op("_diffusers_flash_attn_3::_flash_attn_forward"' in source
    assert "register_autograd" not in source, "it has one now: set `trains` of _flash_3"
    assert not ATTENTION_BACKENDS["_flash_3"].trains


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
def test_a_kernel_for_split_tokens_is_one_that_diffusers_lets_run(name: str):
    kernel, backend = ATTENTION_BACKENDS[name], AttentionBackendName(name)
    if not REGISTRY._is_context_parallel_available(backend):
        assert not kernel.splits
        return
    named = inspect.getclosurevars(inspect.unwrap(REGISTRY._backends[backend])).globals
    forward = next(operation for each, operation in named.items() if each.endswith("_forward_op"))
    backward = next(operation for each, operation in named.items() if each.endswith("_backward_op"))
    assert kernel.splits == ("NotImplementedError" not in inspect.getsource(backward))
    if not kernel.splits:
        return
    adds_booleans = "attn_bias=attn_mask" in inspect.getsource(forward)
    assert kernel.splits_masks == (kernel.takes_masks and not adds_booleans)


def test_the_dispatcher_is_chosen_by_a_public_method():
    assert "backend" in inspect.signature(ModelMixin.set_attention_backend).parameters
