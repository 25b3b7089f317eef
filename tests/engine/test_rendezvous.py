# SPDX-License-Identifier: Apache-2.0
"""The port where the ranks of a worker group meet: outside the range that the kernel hands out to other processes."""

import os
import socket

import pytest
import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_digen.engine import rendezvous
from verl_digen.engine.rendezvous import NUM_TRIED, candidate_ports, free_port


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """`ephemeral("32768\t60999\n")` replaces the kernel's file."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(rendezvous, "EPHEMERAL", file)
    return file.write_text


@pytest.mark.parametrize(
    ("first", "last", "ports"),
    [
        (32_768, 60_999, {*range(20_000, 30_000), *range(61_000, 65_536)}),
        (49_152, 65_535, {*range(20_000, 30_000)}),
        (15_000, 60_999, {*range(61_000, 65_536)}),
        (26_000, 65_535, {*range(20_000, 26_000)}),
    ],
)
def test_ports_are_drawn_anew_outside_the_ephemeral_range_and_away_from_rays_workers(ephemeral, first, last, ports):
    ephemeral(f"{first}\t{last}\n")
    drawn = [candidate_ports() for _ in range(200)]
    assert all(len({*one}) == NUM_TRIED for one in drawn)
    found = {port for one in drawn for port in one}
    assert found <= ports and len(found) > 0.8 * len(ports)


def test_where_the_ephemeral_range_leaves_few_ports_they_are_drawn(ephemeral):
    ephemeral("20003 65535\n")
    assert sorted(candidate_ports()) == [20_000, 20_001, 20_002]


@pytest.mark.parametrize("text", ["1024 65535\n", None, "", "many\n"])
def test_without_room_or_a_range_verls_port_stays_and_the_log_says_so(ephemeral, caplog, text):
    if text is not None:
        ephemeral(text)
    assert free_port() is None
    assert "the ranks meet at verl's port" in caplog.text and "net.ipv4.ip_local_port_range" in caplog.text


def test_ports_that_are_taken_are_passed_over(monkeypatch, caplog):
    with socket.socket() as taken, socket.socket() as last:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "candidate_ports", lambda: [port])
        assert free_port() is None
        assert "the ranks meet at verl's port" in caplog.text
        last.bind(("", 0))
        free = last.getsockname()[1]
    monkeypatch.setattr(rendezvous, "candidate_ports", lambda: [free])
    assert free_port() == free


class Rank(Worker):
    """Meets the others as `DiffusionWorker` does."""

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def free_port(self):
        return rendezvous.free_port()

    @register(dispatch_mode=rendezvous.AT_ONE_PORT)
    def init_model(self, port=None):
        rendezvous.meet_at(port)
        return port, os.environ[rendezvous.MASTER_PORT]


@pytest.mark.slow
def test_all_ranks_of_a_real_group_meet_at_the_port_of_rank_0(ray_cluster):
    group = RayWorkerGroup(
        RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(Rank)),
        device_name="cpu",
    )
    (first, of_first), (second, of_second) = group.init_model()
    assert first == second != int(group._master_port) and of_first == of_second == str(first)
    ephemeral = range(*map(int, rendezvous.EPHEMERAL.read_text().split()))
    assert first not in ephemeral
