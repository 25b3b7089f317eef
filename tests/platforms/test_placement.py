# SPDX-License-Identifier: Apache-2.0
"""Device types in a Ray cluster of one node that has two of them by name."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import ray
import verl.trainer.ppo.v1  # noqa: F401 - the order in which verl imports us
from omegaconf import OmegaConf
from verl.single_controller.ray.base import RayResourcePool
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from tests.local_ray import local_ray
from tests.platforms.driver import Server
from verl_digen.config import DigenConfig, digen_config
from verl_digen.config.placement import TypedPools, check_placement, pool_options, reward_options
from verl_digen.config.pool_sizes import num_pool_devices, num_reward_devices
from verl_digen.errors import RunStopped
from verl_digen.rollout.birth import BornOnDevices, PlacedReplica, SeenDevice, require_same_devices
from verl_digen.rollout.replica import DiffusersReplica
from verl_digen.trainer.nodes import fetch_on_all_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with local_ray(forks=False, num_cpus=4, num_gpus=4, resources={"accelerator_type:H100": 1, "L40S": 1}):
        yield


def make_config(*, reward_devices=0, nodes=1, per_node=2, generators=1, size=1, **placement):
    """A run of two trainer devices and one for the generator, unless told otherwise.

    Args:
        size: devices of a replica.
    """
    return OmegaConf.create(
        {
            "digen": {"placement": placement},
            "trainer": {"nnodes": nodes, "n_gpus_per_node": per_node},
            "actor_rollout_ref": {
                "rollout": {
                    "nnodes": 1,
                    "n_gpus_per_node": generators,
                    "tensor_model_parallel_size": size,
                    "data_parallel_size": 1,
                    "pipeline_model_parallel_size": 1,
                }
            },
            "reward": {
                "num_workers": 2,
                "reward_model": {
                    "enable": False,
                    "enable_resource_pool": reward_devices > 0,
                    "nnodes": 1,
                    "n_gpus_per_node": reward_devices,
                },
            },
        }
    )


def check(**kwargs):
    config = make_config(**kwargs)
    check_placement(config, digen_config(config), is_disaggregated=True)


def test_a_type_is_rays_own_name_or_a_custom_resource(cluster):
    check()
    check(trainer_accelerator="H100", generator_accelerator="L40S", reward_accelerator="L40S", reward_devices=1)


@pytest.mark.parametrize("pool", ["trainer", "generator", "reward"])
def test_a_type_that_the_cluster_has_not_is_an_error_with_those_it_has(cluster, pool):
    with pytest.raises(RunStopped, match=rf"digen.placement.{pool}_accelerator must .*\(H100, L40S\), got 'B200'"):
        check(**{f"{pool}_accelerator": "B200"})


def test_pools_of_one_type_together_find_enough_devices(cluster):
    check(trainer_accelerator="H100", generator_accelerator="H100", reward_accelerator="H100", reward_devices=1)
    with pytest.raises(RunStopped, match=r"trainer_accelerator=H100 and .*reward_accelerator=H100 must find 5 .*got 4"):
        check(trainer_accelerator="H100", generator_accelerator="H100", reward_accelerator="H100", reward_devices=2)


def test_more_devices_than_the_cluster_has_are_an_error_before_any_is_reserved(cluster):
    rule = r"trainer.nnodes x trainer.n_gpus_per_node \(4\) \+ actor_rollout_ref.rollout.nnodes x .* \(1\) must be <= 4"
    for size in ({"per_node": 4}, {"nodes": 4, "per_node": 1}):
        with pytest.raises(
            RunStopped, match=rf"{rule}, the devices of the Ray cluster, on 1 nodes, got 5; ask for fewer"
        ):
            check(**size)


def test_replicas_that_find_no_node_with_as_many_devices_are_an_error_before_any_is_reserved(cluster, monkeypatch):
    check(generators=2, size=2)
    (node,) = ray.nodes()
    halves = [{**node, "Resources": {**node["Resources"], "GPU": 3.0}} for _ in range(2)]
    monkeypatch.setattr(ray, "nodes", lambda: halves)
    check(generators=4, size=2)
    with pytest.raises(RunStopped, match=r"n_gpus_per_node must be <= 0, .*tensor_model_parallel_size=4, got 4; lower"):
        check(generators=4, size=4)


def test_the_trainers_devices_are_reserved_on_nodes_of_its_type(cluster):
    pools = TypedPools({"global_pool": [2]}, {}, max_colocate_count=1, accelerator="H100")
    pools.create_resource_pool()
    (group,) = pools.resource_pool_dict["global_pool"].get_placement_groups(device_name="cpu")
    assert [bundle["accelerator_type:H100"] for bundle in group.bundle_specs] == [1e-4, 1e-4]
    ray.util.remove_placement_group(group)


def placed(size):
    """A replica of so many devices whose pool is described, after verl's hook."""

    class Replica(PlacedReplica):
        async def launch_servers(self):
            raise NotImplementedError

    replica = Replica.__new__(Replica)
    replica.rollout_mode, replica.replica_rank, replica.config = RolloutMode.STANDALONE, 0, None
    replica.world_size, replica.model_config = size, make_config(generator_accelerator="L40S")
    replica.resource_pool = RayResourcePool([size], max_colocate_count=1)
    replica.get_ray_class_with_init_args()
    return replica


def test_devices_of_one_replica_are_reserved_in_one_node_and_of_its_type(cluster):
    pool = placed(2).resource_pool
    (group,) = pool.get_placement_groups(strategy="PACK", device_name="cpu")  # as verl asks, after the hook
    try:
        assert ray.util.placement_group_table(group)["strategy"] == "STRICT_PACK"
        assert [bundle["L40S"] for bundle in group.bundle_specs] == [1e-4, 1e-4]
    finally:
        ray.util.remove_placement_group(group)


def test_a_server_takes_the_samples_of_a_step_at_a_time(cluster):
    """verl's 1040 calls would keep a sign of life waiting behind them."""
    assert placed(1).max_concurrency > 10_000


def test_a_replica_asks_for_its_type_before_its_devices_are_reserved(cluster):
    replica = placed(1)
    assert replica.resource_pool.accelerator_type == "L40S" and replica.resource_pool.pgs is None
    source = inspect.getsource(RolloutReplica.init_standalone)
    assert source.index("self.resource_pool = ") < source.index("self.get_ray_class_with_init_args()")


def test_reward_workers_divide_their_devices(cluster):
    config = make_config(reward_devices=1, reward_accelerator="L40S")
    digen = digen_config(config)
    assert num_reward_devices(config, digen.reward) == 1
    assert reward_options(config, digen) == {"num_gpus": 0.5, "resources": {"L40S": 1e-4}}
    assert reward_options(make_config(), digen_config(make_config())) == {"resources": {}}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"a": 1.0, "b": {"weight": 1, "num_workers": 3}}, 0),
        ({"a": {"weight": 1, "num_gpus": 2, "num_workers": 2}}, 4),
        ({"a": {"weight": 1, "num_gpus": 0.5, "num_workers": 3}}, 2),
        ({"a": {"weight": 1, "num_gpus": 0.6, "num_workers": 3}}, 3),
        ({"a": {"weight": 1, "num_gpus": 0.1, "num_workers": 10}}, 1),
        (
            {
                name: {"weight": 1, "num_gpus": share}
                for name, share in (("a", 0.5), ("b", 0.7), ("c", 0.3), ("d", 0.5))
            },
            2,
        ),
    ],
)
def test_devices_of_rewards_are_packed_into_whole_ones(entries, expected):
    config = make_config()
    config.digen.reward = {"functions": entries}
    reward = digen_config(config).reward
    assert num_reward_devices(config, reward) == num_pool_devices(reward) == expected


def test_rewards_with_devices_of_their_own_are_counted_with_the_other_pools(cluster):
    config = make_config(reward_accelerator="L40S")
    config.digen.reward = {"functions": {"a": {"weight": 1, "num_gpus": 3}}}
    (entry,) = digen_config(config).reward.entries
    options = pool_options(entry.pool, digen_config(config))
    assert options == {"num_cpus": 1, "num_gpus": 3.0, "resources": {"L40S": 1e-4}}
    with pytest.raises(RunStopped) as stopped:
        config.digen.placement = {}
        config.digen.reward.functions.a.num_workers = 9
        check_placement(config, digen_config(config), is_disaggregated=True)
    assert "digen.reward.functions num_workers x num_gpus (27) must be <= " in str(stopped.value)


def test_environments_take_devices_of_the_rewards_type(cluster):
    config = make_config(reward_accelerator="L40S")
    config.digen.environment = {"name": "vlm_judge", "num_gpus": 0.5, "num_workers": 9}
    with pytest.raises(RunStopped, match=r"reward_accelerator=L40S must find 5 devices .* got 4"):
        check_placement(config, digen_config(config), is_disaggregated=True)


class Worker:
    """A trainer's rank, or the worker that holds a replica's device."""


@pytest.fixture
def two_workers(cluster):
    """Workers on the node's second and first device, in this order."""
    first, second = (ray.remote(Worker).options(num_gpus=1, num_cpus=0).remote() for _ in range(2))
    ids = ray.get([worker.__ray_call__.remote(lambda _: ray.get_gpu_ids()[0]) for worker in (first, second)])
    yield (second, first) if ids[0] == 0 else (first, second)
    for worker in (first, second):
        ray.kill(worker)


def launch(worker, mode=RolloutMode.HYBRID):
    """A replica on the device of this worker, whose server is a fake -> the server."""

    class Replica(DiffusersReplica):
        server_class = Server

    replica = Replica.__new__(Replica)
    replica.world_size, replica.nnodes, replica.replica_rank, replica.gpus_per_node = 1, 1, 0, 4
    engine = SimpleNamespace(backend="nccl", update_weights_bucket_megabytes=512)
    replica.config = SimpleNamespace(max_num_seqs=8, checkpoint_engine=engine)
    replica.model_config = SimpleNamespace(digen=DigenConfig())
    replica.rollout_mode, replica.workers = mode, [worker]
    asyncio.run(replica.launch_servers())
    (server,) = replica.servers
    return server


def device_of(worker):
    return str(ray.get(worker.__ray_call__.remote(lambda _: ray.get_gpu_ids()[0])))


@pytest.mark.long
def test_the_driver_of_a_diffusers_replica_finds_the_device_of_its_worker(two_workers):
    second_worker = two_workers[0]
    server = launch(second_worker)
    assert ray.get(server.read_by_the_driver.remote()) == device_of(second_worker) != "0"
    assert ray.get(server.reserved_bytes.remote()) == 0, "where they take turns an update comes between batches"
    ray.kill(server)


@pytest.mark.long
def test_a_diffusers_replica_leaves_room_for_updates_that_come_while_it_generates(two_workers, monkeypatch):
    monkeypatch.setattr(DiffusersReplica, "require_devices", lambda *unused: asyncio.sleep(0))
    server = launch(two_workers[0], RolloutMode.STANDALONE)
    assert ray.get(server.reserved_bytes.remote()) == 3 * 512 << 20
    ray.kill(server)


def test_verls_launch_starts_a_server_with_its_devices_visible(cluster):
    launched = BornOnDevices(Server).options(
        name="a_server", runtime_env={"env_vars": {"SET_BY_VERL": "1"}}, num_cpus=0
    )
    server = launched.remote(cuda_visible_devices="2,3", node_rank=0)
    start = ray.get(server.environment_at_start.remote())
    assert (start["CUDA_VISIBLE_DEVICES"], start["SET_BY_VERL"]) == ("2,3", "1")
    assert start["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1", "Ray leaves the variable alone"
    ray.kill(server)


def test_another_device_than_the_workers_is_an_error_that_shows_both():
    reserved = [SeenDevice("2", "GPU-a"), SeenDevice("3", "GPU-b")]
    require_same_devices("replica 1", reserved, reserved)
    require_same_devices("replica 1", [SeenDevice("2", None)], [SeenDevice("2", "GPU-a")])
    for seen in ([*reversed(reserved)], reserved[:1], [SeenDevice("2", "GPU-b"), SeenDevice("3", "GPU-a")]):
        with pytest.raises(RuntimeError, match=r"replica 1 must compute on .* 2 \(GPU-a\) and 3 \(GPU-b\), got "):
            require_same_devices("replica 1", reserved, seen)


def test_a_node_without_the_checkpoint_is_told_before_a_rank_starts(cluster, tmp_path):
    config = make_config()
    config.actor_rollout_ref.model = {"path": str(tmp_path), "use_shm": False}
    fetch_on_all_nodes(config, is_disaggregated=True)
    config.actor_rollout_ref.model.path = str(tmp_path / "absent")
    with pytest.raises(
        RunStopped, match=r"actor_rollout_ref.model.path .* 1 of 1 nodes with devices lack, .*\(no such"
    ):
        fetch_on_all_nodes(config, is_disaggregated=True)
