# SPDX-License-Identifier: Apache-2.0
"""The port where the ranks of a worker group meet: outside the range that the kernel hands out to other processes."""

import socket

import pytest
import ray
from verl.single_controller.base import Worker
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_digen.patches import verl_master_port
from verl_digen.patches.verl_master_port import MIN_PORTS, NUM_TRIED, port_range, widest_outside
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.disaggregated import DisaggregatedTrainer


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """`ephemeral("32768\t60999\n")` replaces the kernel's file."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(verl_master_port, "EPHEMERAL", file)
    return file.write_text


@pytest.mark.parametrize(
    ("first", "last", "ports"),
    [
        (32_768, 60_999, range(20_000, 30_000)),
        (49_152, 65_535, range(20_000, 30_000)),
        (15_000, 60_999, range(61_000, 65_536)),
        (25_000, 60_000, range(60_001, 65_536)),
        (26_000, 65_535, range(20_000, 26_000)),
    ],
)
def test_ports_lie_outside_the_ephemeral_range_and_away_from_rays_workers(first, last, ports):
    assert widest_outside(first, last) == ports


def test_a_range_is_drawn_anew_for_every_group_and_lies_whole_in_the_window(ephemeral):
    ephemeral("32768\t60999\n")
    drawn = [port_range() for _ in range(2_000)]
    assert all(start >= 20_000 and end <= 30_000 and end - start == NUM_TRIED for start, end in drawn)
    starts = {start for start, _ in drawn}
    assert len(starts) > 1_000 and max(starts) - min(starts) > 8_000


@pytest.mark.parametrize("text", ["1024 65535\n", f"{20_000 + MIN_PORTS - 1} 65535\n"])
def test_without_room_verl_chooses_and_the_log_says_so(ephemeral, caplog, text):
    ephemeral(text)
    assert port_range() is None
    assert "leaves too few others" in caplog.text and "net.ipv4.ip_local_port_range" in caplog.text


@pytest.mark.parametrize("text", [None, "", "many\n"])
def test_where_the_ephemeral_range_cannot_be_read_verl_chooses_and_the_log_says_so(ephemeral, caplog, text):
    if text is not None:
        ephemeral(text)
    assert port_range() is None
    assert "the ephemeral range cannot be read" in caplog.text


def test_a_group_with_a_range_of_its_own_keeps_it(monkeypatch):
    seen = []
    monkeypatch.setattr(verl_master_port, "find_address", lambda group, pg, **given: seen.append(given))
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    verl_master_port.find_address_outside(group, None, bundle_index=3, master_port_range=[7_000, 7_100])
    assert seen == [{"bundle_index": 3, "master_port_range": [7_000, 7_100]}]


@pytest.mark.parametrize("trainer_class", [ColocatedTrainer, DisaggregatedTrainer])
def test_the_trainers_apply_it_before_anything_else_of_their_setup(monkeypatch, trainer_class):
    def applied():
        raise InterruptedError

    monkeypatch.setattr(verl_master_port, "apply", applied)
    with pytest.raises(InterruptedError):
        trainer_class.__new__(trainer_class)._setup()


@pytest.mark.slow
def test_a_real_group_meets_at_the_first_free_port_of_the_range(ray_cluster, monkeypatch):
    monkeypatch.setattr(RayWorkerGroup, "_get_master_addr_port", verl_master_port.find_address)  # put back at the end
    verl_master_port.apply()
    with socket.socket() as taken:
        start, _ = free_from = port_range()
        taken.bind(("", start))
        monkeypatch.setattr(verl_master_port, "port_range", lambda: free_from)
        group = RayWorkerGroup(
            RayResourcePool([1], use_gpu=False, max_colocate_count=1),
            RayClassWithInitArgs(ray.remote(Worker)),
            device_name="cpu",
        )
    assert start < int(group._master_port) < start + NUM_TRIED
