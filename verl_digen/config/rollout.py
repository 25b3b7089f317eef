# SPDX-License-Identifier: Apache-2.0
"""Replicas: `digen.rollout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from verl_digen.attention import check_name
from verl_digen.require import In, OneOf, check_fields, number, require

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
class RolloutConfig:
    """Settings of diffusion replicas that verl's `actor_rollout_ref.rollout` lacks."""

    max_batch_size: Annotated[int | str, In(f"[1, {MAX_SAMPLES}]", "auto"), "memory decides"] = 8
    """Maximum samples that a replica denoises together (memory decides). auto: as many as fit into the device's memory,
    64 at most, on a `diffusers` replica or one rank that generates; measured at the first batches of each kind, and
    halved if one runs out of memory nevertheless. On a CPU and in `vllm_omni` replicas it is 8. Chunks of separate
    pools are cut, and memory is planned, for 8 too."""
    split_guidance: bool | str = "auto"
    """Run the two branches of classifier-free guidance one after the other, in half the memory, rather than in one
    forward, while a `diffusers` replica or the trainer generates. auto: a replica, or one rank that generates, does
    where both together would not fit, measured at the first step of each kind of batch; never on a CPU. The numbers
    differ by rounding."""
    encoders: Annotated[str, OneOf(ENCODERS)] = AUTO
    """Place of the text encoders of a `diffusers` replica, or of a rank that generates, between two encodings. device:
    on its device. host: in host memory; to encode they take the transformer's place on the device, once for all prompts
    that wait, which costs a copy of both to the device. before: nowhere; all prompts of the run are encoded before any
    transformer is loaded, and read from `conditions_dir`. auto: on the host, if they and the transformer take more than
    half of the device's memory. On a CPU nothing moves; a `vllm_omni` replica keeps them on its device."""
    conditions_dir: str = "~/.cache/verl_digen/conditions"
    """Folder of `encoders=before`, which all nodes share. Later runs with the same encoders read what is there."""
    conditions_gb: Annotated[float, In("(0, inf]")] = 100.0
    """Largest size of that folder in GB. What was not used for longest leaves it."""
    attention_backend: str | None = None
    """Attention kernel of the replicas. null: as the trainer, `digen.attention_backend`; a `vllm_omni` replica runs its
    own kernel of that kind, unless `engine_kwargs.vllm_omni.diffusion_attention_backend` names one. Other kernels than
    the trainer's round differently, which `rollout/log_prob_gap_max` shows."""
    compile: bool | None = None
    """Compile the repeated blocks of a `diffusers` replica. null: as the trainer, `digen.compile`. A `vllm_omni`
    replica compiles by `actor_rollout_ref.rollout.enforce_eager`."""
    decode_batch_size: Annotated[int, In(f"[1, {MAX_SAMPLES}]"), "memory decides"] = 4
    """Maximum pictures that a VAE decodes together, in `diffusers` replicas and in trainers that generate; videos are
    decoded one by one. What runs out of memory is decoded one by one, and one that does, in tiles. A picture of 1024 px
    takes about 1.6 GB while it is decoded (calculated for FLUX's VAE in bf16).
    A `vllm_omni` replica decodes one by one."""
    batch_wait_s: Annotated[float, In("[0, 600]")] = 0.05
    """Time that a `diffusers` replica waits after each request for a further one before it starts a batch that is not
    full; a `vllm_omni` replica too, if its pipeline runs in one go, but at most five times as long in total. With step
    execution it adds requests to a running batch. A chunk of separate pools starts when all its samples are there; only
    requests of colocated runs, validations and episodes wait."""
    num_kept_adapters: Annotated[int, In(f"[2, {MAX_SAMPLES}]")] = 4
    """LoRA adapters, one per weight version, that a `vllm_omni` replica keeps for requests in flight; an update waits
    while requests in flight use that many versions."""
    update_timeout_s: Annotated[float, In("(0, inf]")] = 600.0
    """Longest wait in s between two parts of a weight update of a replica, on either side. The trainer
    gathers a tensor of a sharded model between two parts, which takes seconds; `digen.deadlines.train_s` bounds the
    whole update."""
    allow_untested_versions: bool = False
    """Start a `vllm_omni` replica with other versions of vLLM and vLLM-Omni than those it was tested with."""
    embed_cache_size: Annotated[int, In(f"[1, {MAX_SAMPLES}]")] = 1024
    """Maximum number of prompts whose embeddings a replica caches."""
    max_restarts: Annotated[int, In(f"[0, {MAX_SAMPLES}]")] = 8
    """Maximum restarts of lost replicas per run, over all replicas; 0: a lost replica stays lost. If a run needs more
    than a few, look for the cause."""
    num_neighbours: Annotated[int, In(f"[0, {MAX_SAMPLES}]"), "leave it to recipe=disaggregated"] = 0
    """Trainer ranks on a replica's node that compute at the same time. On a CPU, replicas and these ranks share the
    cores. Recipe `disaggregated` sets it."""
    latents_dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Storage dtype of trajectories; latents are rounded to it before the log-prob is taken."""
    max_log_prob_gap: Annotated[float | None, In("(0, inf]"), "null turns the gate off"] = None
    """Largest difference, in nats, between a recorded log-prob and the trainer's own before the run stops
    (`rollout/log_prob_gap_max`). null: it is only reported, because what is healthy depends on dtype and noise level:
    fp32 shows 1e-5. In bf16, set it to about ten times the value of the run's first steps."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.rollout.")
        require(
            isinstance(self.split_guidance, bool) or self.split_guidance == "auto",
            "digen.rollout.split_guidance must be auto, true or false",
            self.split_guidance,
            "auto is the default",
        )
        if self.attention_backend is not None:
            check_name("digen.rollout.attention_backend", self.attention_backend)

    def hosts_encoders(self, num_bytes: int, device_bytes: int | None) -> bool:
        """True if encoders wait in host memory.

        Args:
            num_bytes: of encoders and transformer. device_bytes: memory of the device; None: unknown.
        """
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
