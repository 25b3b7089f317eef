# SPDX-License-Identifier: Apache-2.0
"""Names of nodes in the timeline."""

import pytest

from verl_digen.trainer.hosts import host_of, told

NAMES = {"10.0.0.7": "node-7", "fd00::7": "node-7"}


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.7:8000", "node-7"),
        ("[fd00::7]:8000", "node-7"),
        ("127.0.0.1:8000", "driver"),
        ("10.0.0.8:8000", "10.0.0.8"),
    ],
)
def test_a_server_is_on_the_node_of_its_address(address, host):
    assert host_of(address, NAMES, "driver") == host


def test_a_lane_on_several_nodes_says_how_many():
    assert told(["b", "b"]) == "b" and told(["b", "a", "c", "a"]) == "a and 2 more"
