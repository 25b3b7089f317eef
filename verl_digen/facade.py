# SPDX-License-Identifier: Apache-2.0
"""`RayFlowGRPOTrainer`: for pipelines that construct verl's `RayPPOTrainer` themselves and swap in a subclass."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import ray
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu

from verl_digen.agent_loop.manager import DiffusionAgentLoopManager
from verl_digen.algorithms.advantages import compute_advantage
from verl_digen.data.rows import ROW, object_column
from verl_digen.engine.verl_batches import pack_rows
from verl_digen.preflight import checked
from verl_digen.require import require
from verl_digen.sampling.outputs import training_rows
from verl_digen.store.client import close, start
from verl_digen.trainer.colocated import ColocatedTrainer

logger = logging.getLogger(__name__)

DECIDED_BY = {
    "tokenizer": "the checkpoint at actor_rollout_ref.model.path brings its own",
    "processor": "the checkpoint at actor_rollout_ref.model.path brings its own",
    "role_worker_mapping": "the ranks are DiffusionWorkers",
    "resource_pool_manager": "trainer.nnodes and trainer.n_gpus_per_node, and with separate pools the keys of "
    "actor_rollout_ref.rollout, say which devices are taken",
    "ray_worker_group_cls": "the ranks are in verl's RayWorkerGroup",
    "train_dataset": "data.train_files names the prompts, and data.custom_cls.path and .name a class of your own",
    "val_dataset": "data.val_files names the prompts, and data.custom_cls.path and .name a class of your own",
    "collate_fn": "prompts are collated by verl's",
    "train_sampler": "data.shuffle and data.seed decide on the order",
}
"""Argument of `RayPPOTrainer` -> what decides in its place."""


class RayFlowGRPOTrainer(RayPPOTrainer):
    """`RayPPOTrainer(config)`, `init_workers()` and `fit()` over the trainer that `trainer.v1.trainer_mode` names. Or
    in place of `fit`, one by one, the steps of verl's RFC: see `examples/by_hand.py`. ValueError: the rules that the
    config breaks, one line each; or another argument of `RayPPOTrainer` was given, with what decides in its place.

    The config alone decides, as it does under `verl.trainer.main_ppo`, and is checked as there; `device_name` takes the
    place of `trainer.device`.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Any = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = RayWorkerGroup,
        processor: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ):
        arguments = dict(locals())
        if ray_worker_group_cls is RayWorkerGroup:
            del arguments["ray_worker_group_cls"]
        given = [name for name, value in arguments.items() if name in DECIDED_BY and value is not None]
        require(
            not given,
            "RayFlowGRPOTrainer must be given only the config",
            ", ".join(given),
            "leave out " + "; and ".join(f"{name}: {DECIDED_BY[name]}" for name in given),
        )
        if device_name is not None:
            config.trainer.device = device_name
        found, self._lock = checked(config)
        for note in found:
            logger.warning("%s", note)
        # no super().__init__(): the legacy trainer's own setup is what this class replaces
        self.config = config
        config.transfer_queue.enable = True
        start(config.transfer_queue)
        self._is_awake = True
        """False from the first call on the ranks in a step until the replicas have its weights."""
        self._trainer: Any = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)

    def init_workers(self) -> None:
        """Start trainer ranks, replicas and reward workers."""
        self._trainer.init()

    def fit(self) -> None:
        """Train to the end, then close TransferQueue."""
        try:
            self._trainer.fit(self._agent_loops)
        finally:
            close()

    # -- the steps of verl's RFC by hand, on one pool --------------------------------------------------------
    def next_prompts(self) -> DataProto:
        """The run's next `data.train_batch_size` prompts, a row per sample: each `rollout.n` times."""
        rows = self._by_hand._take_prompts(self.config.data.train_batch_size)
        size = self.config.actor_rollout_ref.rollout.n
        columns = {
            ROW: [row for row in rows for _ in range(size)],
            "uid": [row.uid for row in rows for _ in range(size)],
            "sample_index": [number for _ in rows for number in range(size)],
        }
        step = {"global_steps": self._by_hand.global_steps + 1}
        return DataProto(None, {name: object_column(values) for name, values in columns.items()}, step)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate and score a sample per row -> the columns of `sampling.outputs.to_dataproto`, with `rm_scores`."""
        require(self._is_awake, "generate_sequences must come first in a step", "a second call", "call update_actor")
        worker = self._agent_loops.agent_loop_workers[0]
        return ray.get(worker.generate_sequences.remote(prompts))

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score `responses` again, see `DiffusionRewardLoopManager.compute_rm_score`."""
        return self._by_hand.reward_loop_manager.compute_rm_score(batch)

    def compute_old_log_prob(self, batch: DataProto) -> DataProto:
        """Evaluate `old_log_probs` [N, K] of the recorded transitions under the current weights, and their means
        `latent_sample_means` [N, K, ...]."""
        names = {"old_log_probs": "log_probs", "latent_sample_means": "latent_sample_means"}
        return self._evaluate("compute_log_prob", batch, names, compute_loss=False)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Evaluate `ref_log_prob` [N, K], under the reference; ValueError where the run has none. The KL term of the
        loss does not read it: it compares means, in the same forward."""
        return self._evaluate("compute_ref_log_prob", batch, {"ref_log_prob": "log_probs"})

    def compute_advantage(self, batch: DataProto) -> DataProto:
        """Make `advantages` [N, 1] of `rm_scores`, as `digen.advantage` says, and `selected` [N, 1]: False for samples
        of a group that the run's objective leaves out. ValueError: the run combines advantages of several rewards, or
        its samples share steps."""
        digen, uids = self._by_hand.digen, list(batch.non_tensor_batch["uid"])
        require(digen.reward.combine != "gdpo", "digen.reward.combine must be sum here", "gdpo", "call fit")
        require(not digen.branches.splits, "digen.branches.splits must be [] here", digen.branches.splits, "call fit")
        assert batch.batch is not None
        scores, selected = batch.batch["rm_scores"], torch.zeros(len(uids), 1, dtype=torch.bool)
        for uid in dict.fromkeys(uids):
            group = [number for number, own in enumerate(uids) if own == uid]
            selected[[group[chosen] for chosen in digen.select([scores[number].item() for number in group])]] = True
        scaling = {"scale": digen.advantage.scale, "ddof": digen.advantage.ddof, "eps": digen.advantage.eps}
        return _columns(advantages=compute_advantage(scores, uids, **scaling), selected=selected)

    def update_actor(self, batch: DataProto) -> dict[str, list[float]]:
        """Take one optimizer step on the batch of `generate_sequences`, with `advantages`, and `old_log_probs` if the
        weights have changed since, and send the weights to the replicas -> metrics."""
        trainer, rows = self._by_hand, self._rows(batch)
        once = {"mini_batch_size": len(rows), "epochs": 1, "seed": 0, "dataloader_kwargs": {"shuffle": False}}
        metrics = tu.get(trainer.actor_rollout_wg.update_actor(tu.assign_non_tensor(rows, **once)), "metrics")
        trainer.global_steps += 1
        trainer.timing_raw = {}
        trainer.on_step_end()
        self._is_awake = True
        return metrics

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the current step, from which a run resumes."""
        self._by_hand._save_checkpoint()

    def _evaluate(self, method: str, batch: DataProto, names: Mapping[str, str], **keys: Any) -> DataProto:
        """The ranks' outputs for the batch's rows, [N, K, ...]. `names`: column -> output."""
        rows = tu.assign_non_tensor(self._rows(batch), **keys)
        found = getattr(self._by_hand.actor_rollout_wg, method)(rows)
        return _columns(**{column: found[name].unflatten(0, (len(batch), -1)) for column, name in names.items()})

    def _rows(self, batch: DataProto) -> TensorDict:
        """The transitions of a batch for the ranks; the replicas sleep from now on."""
        if self._is_awake:
            self._by_hand._sleep_replicas()
            self._is_awake = False
        return pack_rows(training_rows(batch))

    @property
    def _by_hand(self) -> ColocatedTrainer:
        """The trainer, on one pool."""
        mode = self.config.trainer.v1.trainer_mode
        require(
            isinstance(self._trainer, ColocatedTrainer),
            "trainer.v1.trainer_mode must be digen_colocated where the steps are called one by one",
            mode,
            "leave recipe disaggregated out, or call fit",
        )
        return self._trainer

    @cached_property
    def _agent_loops(self) -> Any:
        return DiffusionAgentLoopManager.create(  # awaited by verl's auto_await
            config=self.config,
            llm_client=self._trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self._trainer.get_reward_handles(),
        )


def _columns(**tensors: Tensor) -> DataProto:
    (size,) = {len(tensor) for tensor in tensors.values()}
    return DataProto(TensorDict(tensors, batch_size=size))  # pyright: ignore[reportArgumentType]
