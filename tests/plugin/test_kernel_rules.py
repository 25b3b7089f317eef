# SPDX-License-Identifier: Apache-2.0
"""Rules for attention kernels and compiled blocks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_models import build_tiny
from verl_digen.preflight import kernels
from verl_digen.preflight.kernels import (
    check_kernel_machine,
    check_kernel_model,
    check_kernels,
    check_machine,
    check_use,
    kernel_notes,
)
from verl_digen.preflight.start_config import StartConfig

A = "digen.attention_backend"
R = "digen.rollout.attention_backend"
OMNI = "+actor_rollout_ref.rollout.engine_kwargs.vllm_omni.diffusion_attention_backend"
BF16 = "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: bf16}"
SHARED = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
ON_OMNI = "actor_rollout_ref.rollout.name=vllm_omni"
REPLICAS = "actor_rollout_ref.rollout.name=diffusers"


def broken(check: Any, config: Any) -> str:
    with pytest.raises(ValueError) as raised:
        check(StartConfig(config))
    return str(raised.value)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of a run on CUDA, without a GPU of its own."""
    monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: SimpleNamespace(device_name="cuda"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{A}=flash_3", r"must be one of .*got 'flash_3'; did you mean _flash_3\?"),
        (f"{A}=sage", r"must be one of .*got 'sage'"),
        (f"{R}=nativ", r"digen.rollout.attention_backend must be .*did you mean native\?"),
        (f"{A}=_flash_3", "must be a kernel with a backward"),
        (f"{A}=flash,++actor_rollout_ref.actor.fsdp_config.mixed_precision={{param_dtype: fp32}}", f"{A} .* for fp32"),
        (f"{R}=flash,actor_rollout_ref.rollout.dtype=float32", f"{R} .* for float32"),
        (
            f"{SHARED},{A}=_native_efficient",
            f"{A} must be a kernel that diffusers .*choose one of native, .*or set {SHARED[:-2]} to 1",
        ),
        (f"{SHARED},{A}=_native_npu", f"{A} must be .*with its backward, got '_native_npu'"),
        (f"{ON_OMNI},{A}=_native_math", "with actor_rollout_ref.rollout.name=vllm_omni, which has kernels of its own"),
        (f"{ON_OMNI},{R}=flash,{OMNI}=TORCH_SDPA", "must be null where .*diffusion_attention_backend is set"),
        (f"{ON_OMNI},digen.rollout.compile=true", "digen.rollout.compile must be null"),
    ],
)
def test_a_kernel_that_cannot_do_what_is_asked_is_refused(start, on_cuda: None, override: str, message: str):
    config = start("recipe=digen_flowgrpo", BF16, *override.split(","))
    text = broken(check_kernels, config)
    assert re.search(message, text), text


@pytest.mark.parametrize("name", ["native", "flash", "_flash_3_hub", "_native_cudnn", "_flash_3_varlen_hub"])
def test_kernels_of_both_back_ends_and_for_split_tokens_pass(start, on_cuda: None, name: str):
    dtype = "actor_rollout_ref.rollout.dtype=bfloat16"
    splits = [SHARED] if name in ("native", "flash", "_flash_3_varlen_hub") else [ON_OMNI]
    for more in ([], [ON_OMNI], splits):
        check_kernels(StartConfig(start("recipe=digen_flowgrpo", BF16, dtype, f"{A}={name}", *more)))


def test_prompts_that_are_padded_to_be_split_need_a_kernel_with_masks(start, tmp_path: Path):
    def settings(checkpoint: str, *overrides: str) -> Any:
        path = tmp_path / checkpoint
        if not path.exists():
            build_tiny(checkpoint, path)
        return start("recipe=digen_flowgrpo", f"actor_rollout_ref.model.path={path}", *overrides)

    text = broken(check_kernel_model, settings("hunyuan_video", f"{A}=_native_flash", SHARED))
    assert re.search(f"{A} must .*under the mask of prompts.*got '_native_flash'; choose one of native,", text)
    assert "cudnn" not in text
    check_kernel_model(StartConfig(settings("hunyuan_video", f"{A}=flash_varlen_hub", SHARED)))
    check_kernel_model(StartConfig(settings("wan2.1", f"{A}=_native_flash", SHARED)))
    check_kernel_model(StartConfig(settings("hunyuan_video", f"{A}=_native_flash")))


def test_a_package_that_is_missing_or_old_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"needs flash-attn>=2.6.3, got 'flash'; install"):
        check_machine(A, "flash", "cuda")
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "version", lambda name: "2.5.9.post1+cu12")
    with pytest.raises(ValueError, match=r"needs flash-attn>=2.6.3"):
        check_machine(A, "flash", "cuda")
    monkeypatch.setattr(kernels, "version", lambda name: "2.8.3+cu12torch2.13")
    check_machine(A, "flash", "cuda")


def test_a_device_without_the_kernel_is_refused():
    with pytest.raises(ValueError, match=r"must be a kernel for cpu, .*got 'flash'; it runs on cuda"):
        check_machine(A, "flash", "cpu")
    with pytest.raises(ValueError, match=r"must be a kernel for npu, .*it runs on cuda or cpu"):
        check_machine(A, "_native_flash", "npu")
    check_machine(A, "_native_flash", "cpu")
    check_use(A, "_native_flash", trains=True, dtype="float32", device="cpu")


def test_compiled_blocks_need_a_compiler(start, monkeypatch: pytest.MonkeyPatch):
    config = start("recipe=digen_flowgrpo", REPLICAS, "digen.rollout.compile=true")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "digen.rollout.compile must be false without" in broken(check_kernel_machine, config)


def test_vllm_omnis_own_variable_is_refused(start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "SAGE_ATTN")
    assert "must not be set" in broken(check_kernel_machine, start("recipe=digen_flowgrpo", ON_OMNI))


def test_a_network_without_a_choice_is_named(start, tmp_path: Path):
    path = f"actor_rollout_ref.model.path={build_tiny('sd3', tmp_path / 'm')}"
    text = broken(check_kernel_model, start("recipe=digen_flowgrpo", REPLICAS, path, f"{R}=_native_math"))
    assert f"{R} must be native for Stable Diffusion 3" in text
    check_kernel_model(StartConfig(start("recipe=digen_flowgrpo", path)))


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        ([], None),
        ([f"{A}=_native_math"], None),
        ([f"{R}=_native_math"], f"{R}=_native_math, {A}=native"),
        (["digen.compile=true"], None),
        (["digen.rollout.compile=true"], "digen.rollout.compile=true, digen.compile=false"),
        ([ON_OMNI, "actor_rollout_ref.rollout.enforce_eager=true"], None),
        ([ON_OMNI, "actor_rollout_ref.rollout.enforce_eager=false"], "enforce_eager=false, digen.compile=false"),
        ([ON_OMNI, f"{OMNI}=FLASH_ATTN"], "diffusion_attention_backend=FLASH_ATTN, digen.attention_backend=native"),
    ],
)
def test_other_kernels_on_the_two_sides_are_noted(start, overrides: list[str], noted: str | None):
    found = kernel_notes(StartConfig(start("recipe=digen_flowgrpo", *overrides)))
    assert (noted in found[0]) if noted else not found
