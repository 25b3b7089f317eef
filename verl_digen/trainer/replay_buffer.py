# SPDX-License-Identifier: Apache-2.0
"""verl's synchronous replay buffer for whole groups (`trainer.v1.sampler.custom_sampler`)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_digen.store.samples import PromptStatus, list_partition

POLL_INTERVAL_S = 0.02
"""How often the driver looks for finished groups; verl's 2 s would dominate a short step."""


class GroupReplayBuffer(ReplayBuffer):
    """Waits for the groups of a logical batch; a failed group is replaced by a fresh prompt and its reason kept."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL_S, gen_batch_size=1, sync_refill_failed_groups=True)
        self.last_failure = PromptStatus("failure")
        """Status of the last failed group."""
        self.on_poll: Callable[[int], None] = lambda num_ended: None
        """Called at every poll with the number of ended groups; ends the wait by raising."""

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: tuple[set[str], set[str], set[str], Counter]
    ) -> tuple[set[str], int, int, dict]:
        failed = eviction_reasons[2]
        self.on_poll(len(self.finished_keys[partition_id]) + len(failed))
        if failed:
            self.last_failure = list_partition(partition_id).prompts[max(failed)]
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)
