# SPDX-License-Identifier: Apache-2.0
"""Two steps of training, function by function, as the left panel of verl's RFC for diffusion models draws them.

    python examples/by_hand.py recipe=digen_quickstart trainer.default_local_dir=outputs/by_hand

The weights are those of `python -m verl.trainer.main_ppo` with the same words (tests/e2e/test_facade.py).
"""

import sys

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_digen.facade import RayFlowGRPOTrainer


def main(words: list[str], num_steps: int = 2) -> None:
    """Compose the config of `words`, and train."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    OmegaConf.resolve(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    trainer = RayFlowGRPOTrainer(config)
    trainer.init_workers()
    for _ in range(num_steps):
        prompts = trainer.next_prompts()
        batch = trainer.generate_sequences(prompts)  # prompts, responses, ..., latent_samples, log_probs
        batch.batch["rm_scores"] = trainer.compute_rm_score(batch).batch["rm_scores"]
        batch = batch.union(trainer.compute_old_log_prob(batch))
        if config.digen.kl.coef > 0:
            batch = batch.union(trainer.compute_ref_log_prob(batch))
        batch = batch.union(trainer.compute_advantage(batch))
        metrics = trainer.update_actor(batch)
        print(f"reward {batch.batch['rm_scores'].mean():.4f}, gradient norm {metrics['grad_norm'][0]:.3g}", flush=True)
    trainer.save_checkpoint()


if __name__ == "__main__":
    main(sys.argv[1:])
