# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU kernels in plain PyTorch, so that its wheel for accelerators runs a language model without one.

vLLM's wheel for CUDA has the CPU platform, worker and model runner, and lacks the operators that they call. `install`
makes a folder for PYTHONPATH: a package with an entry point of `vllm.general_plugins`, which each process of vLLM
loads, and which defines the operators with the signatures of `vllm/_custom_ops.py` (0.28.0). Slow, and exact: an
attention by its definition, one request after the other.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "digen_cpu_kernels"


def install(folder: Path) -> Path:
    """Write the package -> the folder for PYTHONPATH."""
    info = folder / f"{NAME}-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:define\n")
    shutil.copy(__file__, folder / f"{NAME}.py")
    return folder


def define() -> None:
    """Define the operators in this process, once."""
    from verl_digen.patches import vllm_cpu_activations, vllm_cpu_linear

    torch._dynamo.config.disable = True  # compiling two lines of vLLM's sampler takes longer than a run
    find_pictures()
    vllm_cpu_activations.apply()
    vllm_cpu_linear.apply()
    if hasattr(torch.ops._C, "get_scheduler_metadata"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(library)
    for schema, kernel in KERNELS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], kernel, "CompositeExplicitAutograd")


def find_pictures() -> None:
    """Let transformers find Idefics3's image processor for PIL.

    transformers 5.10.4 takes its file for one that needs torchvision, because a comment in it names a class that does.
    """
    from transformers import Idefics3Config
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    AutoImageProcessor.register(Idefics3Config, slow_image_processor_class=Idefics3ImageProcessorPil, exist_ok=True)


_LIBRARIES: list[torch.library.Library] = []
"""Kept: operators go with the object that defined them."""


def init_cpu_memory_env(nodes: list[int]) -> None:
    """No-op: binds memory to a node of the machine."""


def compute_slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    """Place of each new token in the cache: block x block size + place in the block.

    Args:
        query_start_loc: [R + 1], first token of each request.
        positions: [N], place of each token in its request.
        block_table: [R, blocks per request].
        slot_mapping: [N or more], written.
    """
    for request in range(len(query_start_loc) - 1):
        begin, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        here = positions[begin:end].long()
        blocks = block_table[request][here // block_size].long()
        slot_mapping[begin:end] = blocks * block_size + here % block_size


def scheduler_metadata(*arguments: Any) -> Tensor:
    """Empty tensor: there is nothing to plan."""
    return torch.empty(0, dtype=torch.int8)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Write keys and values [N, H, D] into caches [blocks, H, block size, D]; a slot of -1 is padding."""
    block_size, slots = key_cache.shape[2], slot_mapping[: len(key)]
    written = slots >= 0
    slots = slots[written]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // block_size, :, slots % block_size] = new[written]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    metadata: Tensor,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Attention of each request's new tokens [N, H, D] over its cached ones, into `output`."""
    if alibi_slopes is not None or softcap or s_aux is not None or dynamic_causal is not None or sliding_window > 0:
        raise NotImplementedError("attention with slopes, a cap, sinks or a window")
    block_size = key_cache.shape[2]
    for request, length in enumerate(seq_lens.tolist()):
        begin, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        places = torch.arange(length)
        blocks = block_table[request][places // block_size].long()
        keys, values = (cache[blocks, :, places % block_size] for cache in (key_cache, value_cache))  # [L, H, D]
        repeats = query.shape[1] // keys.shape[1]
        keys, values = (one.repeat_interleave(repeats, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
        if causal:
            newest = torch.arange(length - (end - begin), length)
            scores = scores.masked_fill(places[None, None, :] > newest[None, :, None], float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        output[begin:end] = mixed.reshape(output[begin:end].shape)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Turn query and key [N, H x D] in place by their positions [N]; `cos_sin_cache` is [positions, D]."""
    if not is_neox:
        raise NotImplementedError("rotation of neighbouring channels")
    cos, sin = (one[:, None] for one in cos_sin_cache[positions.flatten()].chunk(2, dim=-1))  # [N, 1, D/2]
    for one in (query, key):
        if one is not None:
            heads = one.reshape(len(one), -1, head_size)
            first, second = heads.chunk(2, dim=-1)
            one.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).reshape(one.shape))


KERNELS = {
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox) -> ()": rotary_embedding,
    "init_cpu_memory_env(int[] nodes) -> ()": init_cpu_memory_env,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table,"
    " Tensor(a!) slot_mapping, int block_size) -> ()": compute_slot_mapping,
    "get_scheduler_metadata(int num_reqs, int num_heads, int num_kv_heads, int head_dim, Tensor seq_lens,"
    " ScalarType dtype, Tensor query_start_loc, bool causal, int window, str isa, bool kv_split,"
    " Tensor? dynamic_causal, str kv_cache_dtype) -> Tensor": scheduler_metadata,
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, str isa, float k_scale, float v_scale, str kv_cache_dtype) -> ()": reshape_and_cache,
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output,"
    " Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, int sliding_window,"
    " Tensor block_table, float softcap, Tensor metadata, Tensor? s_aux, Tensor? dynamic_causal, float k_scale,"
    " float v_scale, str kv_cache_dtype) -> ()": attention,
}
"""Schema of each operator -> its kernel."""
