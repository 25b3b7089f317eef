# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest

from verl_digen.weights.probe import Probe, check_probes, check_reached, decides, is_probe_due, network_of

FIRST = Probe(version=0, checksums=(7,), num_tensors=9, fingerprint=(1.0, 2.0))
SECOND = Probe(version=1, checksums=(8,), num_tensors=9, fingerprint=(1.0, 2.1))


def test_weights_that_change_and_an_output_that_does_not_are_an_error_that_names_the_replica():
    with pytest.raises(RuntimeError, match=r"replica r1 took version 1 \(9 tensors.*target_modules"):
        check_probes({"r0": [FIRST, SECOND], "r1": [FIRST, replace(SECOND, fingerprint=FIRST.fingerprint)]})


def test_each_network_of_a_checkpoint_must_change_with_its_own_weights():
    before = Probe(version=0, checksums=(7, 8), num_tensors=9, fingerprint=(1.0, 2.0, 3.0, 4.0))
    both = replace(before, version=1, checksums=(17, 18), fingerprint=(1.1, 2.0, 3.0, 4.1))
    assert check_probes({"r0": [before, both]}) == {"rollout/probe_change": pytest.approx(0.1 / math.hypot(3.0, 4.1))}
    one = replace(both, checksums=(17, 8), fingerprint=(1.1, 2.0, 3.0, 4.0))
    assert check_probes({"r0": [before, one]})["rollout/probe_change"] > 0, "the other's weights are what they were"
    stuck = replace(both, fingerprint=(1.1, 2.0, 3.0, 4.0))
    with pytest.raises(RuntimeError, match=r"replica r0 took version 1 .* network 2 of 2 computes bitwise"):
        check_probes({"r0": [before, stuck]})


def test_a_fingerprint_has_two_numbers_of_every_network():
    with pytest.raises(ValueError, match="two numbers for each of 2 networks, got 2"):
        Probe(version=0, checksums=(7, 8), num_tensors=9, fingerprint=(1.0, 2.0))


def test_a_tensor_belongs_to_the_network_that_its_name_begins_with():
    experts = ("transformer", "transformer_2")
    assert [network_of(f"{name}.proj.weight", experts) for name in experts] == [0, 1]
    assert network_of("base_model.model.transformer_2.proj.lora_B.weight", experts) == 1
    assert network_of("proj.weight", experts[:1]) == 0
    with pytest.raises(RuntimeError, match=r"transformer, transformer_2, got 'proj\.weight'"):
        network_of("proj.weight", experts)


def test_the_smallest_change_of_a_replica_is_reported_relative_to_its_size():
    far = [replace(FIRST, checksums=(1,), fingerprint=(9.0, 9.0)), replace(SECOND, checksums=(2,))]
    assert check_probes({"r0": [FIRST, SECOND], "r1": far}) == {
        "rollout/probe_change": pytest.approx(0.1 / math.hypot(1.0, 2.1))
    }


def test_before_a_second_probe_and_with_the_same_weights_there_is_no_change_to_demand():
    assert check_probes({"r0": [], "r1": [FIRST]}) == {}
    assert check_probes({"r0": [FIRST, replace(FIRST, version=1)]}) == {}


def test_replicas_with_equal_weights_and_other_outputs_are_an_error():
    near, far = (replace(FIRST, fingerprint=(1.0, second)) for second in (2.02, 2.2))
    assert check_probes({"r0": [FIRST], "r1": [near]}) == {"rollout/probe_spread": pytest.approx(0.009, abs=1e-3)}
    with pytest.raises(RuntimeError, match=r"replicas r0 and r1 have the same weights .* digen.rollout.probe_every=0"):
        check_probes({"r0": [FIRST], "r1": [far]})


def test_replicas_with_other_weights_are_not_compared():
    assert check_probes({"r0": [FIRST], "r1": [replace(SECOND, fingerprint=(5.0, 5.0))]}) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_output_that_is_not_finite_is_an_error(value):
    with pytest.raises(RuntimeError, match=r"replica r0 computes .* must be finite"):
        check_probes({"r0": [replace(FIRST, fingerprint=(1.0, value))]})


def test_a_version_that_a_replica_has_not_received_is_an_error():
    assert check_reached({"r0": 5, "r1": 5}, [5, 3], 5) == {"rollout/version_lag_max_versions": 2.0}
    for received in (4, None, 6):
        with pytest.raises(RuntimeError, match=f"version 5 was published and replica r1 has received {received}"):
            check_reached({"r0": 5, "r1": received}, [5, 3], 5)


def test_the_first_three_updates_and_every_nth_are_probed_and_none_with_0():
    assert [number for number in range(12) if is_probe_due(number, 5)] == [0, 1, 2, 5, 10]
    assert not any(is_probe_due(number, 0) for number in range(12))


def test_a_change_of_loras_a_alone_decides_nothing():
    assert not decides("base_model.model.blocks.0.to_q.lora_A.weight")
    assert decides("base_model.model.blocks.0.to_q.lora_B.weight") and decides("blocks.0.to_q.weight")
