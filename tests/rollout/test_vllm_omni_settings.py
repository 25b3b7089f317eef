# SPDX-License-Identifier: Apache-2.0
"""Accepted settings and versions of vLLM-Omni; runs without it installed."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from verl_digen.hardware.versions import ENGINE_PACKAGES, ENGINE_TESTED
from verl_digen.rollout.vllm_omni import settings
from verl_digen.rollout.vllm_omni.settings import ALLOWED, REFUSED, check_settings, check_versions

GOOD = {bool: True, int: 900, str: "auto"}


def test_a_setting_that_changes_numbers_or_that_another_key_sets_is_refused_with_its_reason():
    for name, reason in REFUSED.items():
        with pytest.raises(ValueError) as refused:
            check_settings({name: None}, is_stepwise=True)
        assert f"engine_kwargs.vllm_omni.{name} must not be set: {reason}" in str(refused.value)
        assert "drop the key" in str(refused.value)
    assert all("log-probs would be wrong" in REFUSED[name] for name in ("cache_backend", "quantization"))


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_setting_of_speed_or_memory_is_taken_with_a_value_of_its_type(name):
    check_settings({name: GOOD[ALLOWED[name]]}, is_stepwise=True)
    with pytest.raises(ValueError, match=f"{name} must be of type {ALLOWED[name].__name__}"):
        check_settings({name: [1]}, is_stepwise=True)
    if ALLOWED[name] is int:
        with pytest.raises(ValueError, match="must be of type int"):
            check_settings({name: True}, is_stepwise=True)


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="got 'vae_use_tilling'; did you mean vae_use_tiling"):
        check_settings({"vae_use_tilling": True}, is_stepwise=True)


def test_a_quantizing_attention_is_refused():
    check_settings({"diffusion_attention_backend": "FLASH_ATTN"}, is_stepwise=True)
    with pytest.raises(ValueError, match=r"diffusion_attention_backend must be one of .*got 'SAGE_ATTN'"):
        check_settings({"diffusion_attention_backend": "SAGE_ATTN"}, is_stepwise=True)


def test_offload_is_refused_where_prompts_are_encoded_beside_a_batch():
    check_settings({"enable_cpu_offload": True}, is_stepwise=True)
    check_settings({"enable_cpu_offload": False}, is_stepwise=False)
    with pytest.raises(ValueError, match="enable_cpu_offload must be false for a pipeline that runs in one go"):
        check_settings({"enable_cpu_offload": True}, is_stepwise=False)


def test_no_setting_is_both_taken_and_refused():
    assert not ALLOWED.keys() & REFUSED.keys()


@pytest.mark.parametrize("tested", ENGINE_TESTED)
def test_tested_versions_may_serve(tested, monkeypatch):
    monkeypatch.setattr(settings, "version", dict.fromkeys(ENGINE_PACKAGES, tested).__getitem__)
    check_versions(allow_untested=False)


@pytest.mark.parametrize("found", [("0.28.0", "0.30.0"), ("0.29.0", "0.29.0")], ids=" and ".join)
def test_another_pair_of_versions_is_refused_with_the_tested_ones_unless_it_is_asked_for(found, monkeypatch):
    monkeypatch.setattr(settings, "version", dict(zip(ENGINE_PACKAGES, found, strict=True)).__getitem__)
    refused = rf"tested with vllm and vllm-omni 0\.28\.0 or 0\.30\.0, .*got '{' and '.join(found)}'.*allow_untested"
    with pytest.raises(ValueError, match=refused):
        check_versions(allow_untested=False)
    check_versions(allow_untested=True)


def test_the_extra_installs_the_first_of_the_tested_versions():
    pinned = [Requirement(line) for line in requires("verl-digen") or [] if 'extra == "vllm-omni"' in line]
    assert {one.name: str(one.specifier) for one in pinned} == dict.fromkeys(ENGINE_PACKAGES, f"=={ENGINE_TESTED[0]}")
