# SPDX-License-Identifier: Apache-2.0
"""examples/clusters/kuberay.yaml and docker/compose.yaml are valid, fit themselves, and start what verl composes."""

import shlex
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import compose_spec
import pytest
import yaml

from tests.clusters.manifests import DEVICE, devices_of, interpolated, manifest_problems, ray_job
from tests.docs.test_commands import MAIN, composed
from tests.plugin.conftest import start

__all__ = ["start"]

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = (ROOT / "examples" / "clusters" / "kuberay.yaml").read_text()
COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """Services of the compose file, with defaults in place of variables."""
    return yaml.safe_load(interpolated(COMPOSE, {}))["services"]


def parsed(text: str) -> compose_spec.PyCompose:
    """A compose file by the specification; raises ValueError."""
    plain = yaml.safe_load(text)  # merges `<<`, which the specification takes from YAML
    compose = compose_spec.PyCompose.from_yaml(yaml.safe_dump(plain))
    compose.validate()
    return compose


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


@pytest.mark.parametrize("variables", [{}, {"TAG": "0.1.0", "SHM_SIZE": "128gb", "EXTRAS": "rewards,vllm-omni"}])
def test_the_compose_file_is_valid(variables: dict[str, str]):
    assert parsed(interpolated(COMPOSE, variables)).service_names() == ["head", "run", "worker"]


def test_the_run_of_compose_waits_for_both_nodes_and_takes_all_their_devices(start, services):
    command = services["run"]["command"]
    assert command[:4] == ["ray", "job", "submit", "--"] and command[4:7] == MAIN
    words = shlex.split(list2cmdline(command[7:]))  # as `ray job submit` hands them on, and a shell splits them
    assert words == command[7:]
    config = composed(start, words)
    assert services["run"]["depends_on"] == {"worker": {"condition": "service_healthy"}}
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    devices = {}
    for name in ("head", "worker"):
        [reserved] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        devices[name] = set(reserved["device_ids"])
    assert not devices["head"] & devices["worker"]
    rollout = config.actor_rollout_ref.rollout
    asked = config.trainer.nnodes * config.trainer.n_gpus_per_node, rollout.nnodes * rollout.n_gpus_per_node
    assert asked == (len(devices["head"]), len(devices["worker"]))
    assert config.trainer.default_local_dir.startswith("/shared/")


def test_nodes_of_compose_have_the_image_shared_folders_and_memory_of_their_own(services):
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for service in services.values():
        assert service["image"] == services["head"]["image"] and service["shm_size"] == "64gb"
        folders = {volume.split(":")[1] for volume in service["volumes"]}
        assert folders == {"/shared", "/cache/huggingface", "/data"}
    assert "/shared /cache/huggingface" in dockerfile, "volumes take the owner of the image's folders"
    assert set(services["head"]["build"]["args"]) <= {
        line.split()[1].partition("=")[0] for line in dockerfile.splitlines() if line.startswith("ARG ")
    }
    commands = [services[name]["command"] for name in ("head", "worker")]
    assert all(command[:2] == ["ray", "start"] and command[-1] == "--block" for command in commands)
    assert "--address=head:6379" in commands[1] and services["run"]["environment"]["RAY_ADDRESS"] == "http://head:8265"
