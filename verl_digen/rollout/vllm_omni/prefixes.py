# SPDX-License-Identifier: Apache-2.0
"""Steps before the window, once for the samples of a group: `verl_digen.sampling.prefix` for recordings.

| pipeline | the first sample of a group | the others, of the same batch or a later one |
| --- | --- | --- |
| step by step | runs these steps by itself before its first step in the batch | join the batch at their window |
| in one call per batch | runs them in a call of its own, without decoding | a call with the rest of the schedule |

The other requests of the batch wait meanwhile; an abort takes effect after these steps. Weights are identified by the
adapter of the request. Those that are loaded have no other name: loading them clears the cache (`worker.py`). Every
worker of a replica gets the same requests and skips the same steps.

Invariant (tests/vllm_omni/test_prefix.py, test_request_mode.py): a sample that is generated alone is bitwise the one
that runs every step.
"""

from __future__ import annotations

from functools import cached_property

import torch

from verl_digen.rollout.vllm_omni.recorder import Recording, RecordingPipeline
from verl_digen.sampling.prefix import Prefix, PrefixCache, prefix_of
from verl_digen.sampling.recording import initial_seed


def _waiting_prefix(recording: Recording) -> Prefix | None:
    """Steps before the recording's window; None if it need not wait for it."""
    request = recording.request
    if not request.window.sde_steps:
        return None
    return prefix_of(request, initial_seed(recording.order.run_seed, request))


class PrefixSharing(RecordingPipeline):
    """Mixin for the recording pipelines."""

    @cached_property
    def prefixes(self) -> PrefixCache:
        """Latents at the start of windows."""
        return PrefixCache()

    def steps_to_run(self, recording: Recording) -> int:
        """Begin a recording at its window if the latents there are known -> else its steps before it; 0: none."""
        prefix = _waiting_prefix(recording)
        if prefix is None:
            return 0
        known = self.prefixes.lookup(prefix, recording.adapter_id)
        if known is None:
            return prefix.num_steps
        device = recording.latents.device
        recording.latents = known.unsqueeze(0).to(device, copy=True)  # vLLM-Omni writes into latents
        recording.log_probs = [torch.zeros((), device=device)] * prefix.num_steps
        recording.num_shared_steps = prefix.num_steps
        return 0

    def keep_prefix(self, recording: Recording) -> None:
        """Keep the latents of a recording that has just run the steps before its window."""
        prefix = _waiting_prefix(recording)
        assert prefix is not None and recording.num_taken == prefix.num_steps
        recording.predicted = None  # its next step is stochastic
        self.prefixes.keep(prefix, recording.adapter_id, recording.latents[0])
