# SPDX-License-Identifier: Apache-2.0
"""examples/clusters/kuberay.yaml is valid, fits itself, and starts what verl composes."""

import shlex
from pathlib import Path

from tests.clusters.manifests import DEVICE, devices_of, manifest_problems, ray_job
from tests.docs.test_commands import MAIN, composed
from tests.plugin.conftest import start

__all__ = ["start"]

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = (ROOT / "examples" / "clusters" / "kuberay.yaml").read_text()


def test_the_manifest_of_kuberay_is_valid():
    assert manifest_problems(KUBERAY) == []


def test_the_run_of_kuberay_takes_all_devices_of_both_pools(start):
    spec = ray_job(KUBERAY)
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == MAIN
    config = composed(start, words[3:])
    trainer, generator = spec["rayClusterSpec"]["workerGroupSpecs"]
    rollout, placement = config.actor_rollout_ref.rollout, config.digen.placement
    asked = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert devices_of(trainer) == {DEVICE: asked, placement.trainer_accelerator: asked}
    asked = rollout.nnodes * rollout.n_gpus_per_node
    assert devices_of(generator) == {DEVICE: asked, placement.generator_accelerator: asked}
    mounted = {mount["mountPath"] for mount in trainer["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {"/shared", "/dev/shm"} and config.trainer.default_local_dir.startswith("/shared/")


def test_ray_of_the_manifest_is_that_of_the_image():
    locked = (ROOT / "docker" / "requirements-rewards.txt").read_text()
    assert f"\nray=={ray_job(KUBERAY)['rayClusterSpec']['rayVersion']}\n" in locked
