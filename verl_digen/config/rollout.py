# SPDX-License-Identifier: Apache-2.0
"""Replicas: `digen.rollout`."""

from dataclasses import dataclass
from typing import Annotated

from verl_digen.hardware.attention import ATTENTION_BACKENDS
from verl_digen.require import In, OneOf, Section, number, require

MAX_SAMPLES = 1_000_000
"""Samples, chunks or groups in one place; more than a cluster generates at once. Catches typos."""
DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"
ENCODERS = (AUTO, "device", "host", "before")
MOST_TOGETHER = 0.5
"""Share of the device's memory that encoders and transformer may take together, under `encoders=auto`."""
AUTO_BATCH_SIZE = 8
"""Samples of a batch under `max_batch_size=auto`, where memory does not limit it or is not measured yet."""
MOST_AUTO = 64
"""Most samples of a batch under `max_batch_size=auto`: a larger one is hardly faster per sample."""


@dataclass(frozen=True)
class RolloutConfig(Section, key="digen.rollout"):
    """Settings of replicas that verl's `actor_rollout_ref.rollout` lacks."""

    max_batch_size: Annotated[int | str, In(f"[1, {MAX_SAMPLES}]", "auto"), "memory decides"] = 8
    """Maximum samples that a replica denoises together. auto: as many as fit, at most 64, on a `diffusers` replica or
    one rank that generates; measured at the first batches of each kind, and halved if one runs out of memory. On a CPU,
    in `vllm_omni` replicas, for chunks of separate pools and in plans auto is 8."""
    split_guidance: bool | str = "auto"
    """Generate with guidance in two forwards, in half the memory (`diffusers` replicas and the trainer). auto: if one
    forward does not fit, measured at the first step of each kind of batch; never on a CPU. Results differ by
    rounding."""
    encoders: Annotated[str, OneOf(ENCODERS)] = AUTO
    """Place of the text encoders of a `diffusers` replica, or of a rank that generates. device: beside the transformer.
    host: in host memory; they swap places with the transformer to encode all waiting prompts. before: nowhere; prompts
    are encoded into `conditions_dir` before the transformer is loaded. auto: host, if they and the transformer take
    more than half of the device. No effect on a CPU and for `vllm_omni` replicas."""
    conditions_dir: str = "~/.cache/verl_digen/conditions"
    """Folder of `encoders=before`, shared by all nodes and reused by later runs with the same encoders."""
    conditions_gb: Annotated[float, In("(0, inf]")] = 100.0
    """Maximum size of that folder in GB; the least recently used embeddings are removed."""
    attention_backend: Annotated[str | None, OneOf(sorted(ATTENTION_BACKENDS))] = None
    """Attention kernel of the replicas. null: `digen.attention_backend`. A `vllm_omni` replica uses its own kernel of
    that kind, unless `engine_kwargs.vllm_omni.diffusion_attention_backend` names one."""
    compile: bool | None = None
    """Compile the repeated blocks of `diffusers` replicas. null: `digen.compile`. For `vllm_omni` replicas see
    `actor_rollout_ref.rollout.enforce_eager`."""
    decode_batch_size: Annotated[int, In(f"[1, {MAX_SAMPLES}]"), "memory decides"] = 4
    """Maximum pictures that a VAE decodes together; 1 for videos and for `vllm_omni` replicas of models other than
    Qwen-Image. If memory runs out: one by one, then in tiles. A picture of 1024 px takes about 1.6 GB (calculated for
    FLUX's VAE in bf16)."""
    batch_wait_s: Annotated[float, In("[0, 600]")] = 0.05
    """Seconds that a `diffusers` replica waits after each request until its batch is full; a `vllm_omni` replica whose
    pipeline runs in one call waits at most five times as long in total. Chunks of separate pools do not wait."""
    num_kept_adapters: Annotated[int, In(f"[2, {MAX_SAMPLES}]")] = 4
    """LoRA adapters, one per weight version, that a `vllm_omni` replica keeps for requests in flight; an update waits
    if all are in use."""
    update_timeout_s: Annotated[float, In("(0, inf]")] = 600.0
    """Timeout between two parts of a replica's weight update; `digen.deadlines.train_s` limits the whole update."""
    allow_untested_versions: bool = False
    """Allow versions of vLLM and vLLM-Omni that `vllm_omni` replicas were not tested with."""
    embed_cache_size: Annotated[int, In(f"[1, {MAX_SAMPLES}]")] = 1024
    """Maximum number of prompts whose embeddings a replica caches."""
    max_restarts: Annotated[int, In(f"[0, {MAX_SAMPLES}]")] = 8
    """Maximum restarts of lost replicas per run, over all replicas; 0: none."""
    num_neighbours: Annotated[int, In(f"[0, {MAX_SAMPLES}]"), "leave it to recipe=disaggregated"] = 0
    """Trainer ranks that compute on a replica's node at the same time and share its CPU cores. Recipe `disaggregated`
    sets it."""
    latents_dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Dtype of stored trajectories; latents are rounded to it before their log-prob is computed."""
    max_log_prob_gap: Annotated[float | None, In("(0, inf]"), "null turns the gate off"] = None
    """Stop the run if `rollout/log_prob_gap_max` exceeds this number of nats. null: never. In fp32 the gap is 1e-5; in
    bf16 set about ten times the value of the first steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.split_guidance, bool) or self.split_guidance == "auto",
            "digen.rollout.split_guidance must be auto, true or false",
            self.split_guidance,
            "auto is the default",
        )

    def hosts_encoders(self, num_bytes: int, device_bytes: int | None) -> bool:
        """True if encoders wait in host memory. `num_bytes`: of encoders and transformer; `device_bytes`: memory of the
        device; None: unknown."""
        if self.encoders != AUTO:
            return self.encoders == "host"
        return device_bytes is not None and num_bytes > MOST_TOGETHER * device_bytes

    @property
    def batch_size(self) -> int:
        """Samples of a batch: `max_batch_size`, or `AUTO_BATCH_SIZE` with auto."""
        return number(self.max_batch_size) or AUTO_BATCH_SIZE

    @property
    def fits_batches(self) -> bool:
        """True if memory decides."""
        return number(self.max_batch_size) is None
