# SPDX-License-Identifier: Apache-2.0
"""The modes that are compared, and their order."""

from verl_digen.bench.modes import MODES, interleaved, parse_modes


def test_separate_modes_differ_in_the_switches_of_their_techniques_alone():
    separate = [mode for mode in MODES.values() if mode.is_disaggregated]
    assert [mode.name for mode in separate] == ["barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    assert {mode.recipes for mode in separate} == {("disaggregated",)}
    switched = {mode.name: dict(override.split("=") for override in mode.overrides) for mode in separate}
    keys = {"digen.gap.enable", "digen.tsp.enable", "digen.tag.policy", "digen.staleness.max_versions"}
    for mode in separate:
        # tiles of several timesteps are what is compared, not what is given
        assert switched[mode.name].keys() - {"digen.tsp.steps_per_tile"} == keys
        assert switched[mode.name]["digen.tag.policy"] == ("bts" if "tag" in mode.techniques else "off")
        assert switched[mode.name]["digen.staleness.max_versions"] == str(int("tcss" in mode.techniques))
        for technique in ("gap", "tsp"):
            assert switched[mode.name][f"digen.{technique}.enable"] == str(technique in mode.techniques).lower()


def test_a_colocated_run_is_there_with_the_same_tiles_as_separate_pools_have_and_without():
    with_tsp, without = MODES["colocated+tsp"], MODES["colocated"]
    assert with_tsp.recipes == without.recipes == ()
    assert set(with_tsp.overrides) <= set(MODES["gap+tsp"].overrides)
    assert set(without.overrides) <= set(MODES["gap"].overrides)
    assert with_tsp.overrides == ("digen.tsp.enable=true",)


def test_repeats_are_interleaved():
    order = interleaved(parse_modes("barrier,gap"), 3)
    assert [(repeat, mode.name) for repeat, mode in order] == [
        *((0, "barrier"), (0, "gap")),
        *((1, "barrier"), (1, "gap")),
        *((2, "barrier"), (2, "gap")),
    ]
