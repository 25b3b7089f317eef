# SPDX-License-Identifier: Apache-2.0
"""Device types in a Ray cluster of one node that has two of them by name."""

import inspect

import pytest
import ray
from omegaconf import OmegaConf
from verl.single_controller.ray.base import RayResourcePool
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_digen.config import digen_config
from verl_digen.errors import RunStopped
from verl_digen.platforms.placement import TypedPools, check_placement, reward_options
from verl_digen.pool_sizes import num_reward_devices
from verl_digen.rollout.placed import PlacedReplica

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=4,
        num_gpus=4,
        resources={"accelerator_type:H100": 1, "L40S": 1},
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def make_config(*, reward_devices=0, **placement):
    """A run of two trainer devices and one for the generator."""
    return OmegaConf.create(
        {
            "digen": {"placement": placement},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
            "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 1}},
            "reward": {
                "num_workers": 2,
                "reward_model": {
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


def test_the_trainers_devices_are_reserved_on_nodes_of_its_type(cluster):
    pools = TypedPools({"global_pool": [2]}, {}, max_colocate_count=1, accelerator="H100")
    pools.create_resource_pool()
    (group,) = pools.resource_pool_dict["global_pool"].get_placement_groups(device_name="cpu")
    assert [bundle["accelerator_type:H100"] for bundle in group.bundle_specs] == [1e-4, 1e-4]
    ray.util.remove_placement_group(group)


def test_a_replica_asks_for_its_type_before_its_devices_are_reserved(cluster):
    class Replica(PlacedReplica):
        async def launch_servers(self):
            raise NotImplementedError

    replica = Replica.__new__(Replica)
    replica.rollout_mode, replica.replica_rank, replica.config = RolloutMode.STANDALONE, 0, None
    replica.model_config = make_config(generator_accelerator="L40S")
    replica.resource_pool = RayResourcePool([1])
    replica.get_ray_class_with_init_args()
    assert replica.resource_pool.accelerator_type == "L40S" and replica.resource_pool.pgs is None
    source = inspect.getsource(RolloutReplica.init_standalone)
    assert source.index("self.resource_pool = ") < source.index("self.get_ray_class_with_init_args()")


def test_reward_workers_divide_their_devices(cluster):
    config = make_config(reward_devices=1, reward_accelerator="L40S")
    assert num_reward_devices(config) == 1
    assert reward_options(config, digen_config(config)) == {"num_gpus": 0.5, "resources": {"L40S": 1e-4}}
    assert reward_options(make_config(), digen_config(make_config())) == {"resources": {}}
