# SPDX-License-Identifier: Apache-2.0
"""The modes that `digen bench` compares, and its medians and ratios, against numbers worked out by hand."""

import json
import random

import pytest

from verl_digen.cli import main
from verl_digen.tools import bench
from verl_digen.tools.checkup import training


def test_modes_differ_in_the_switches_of_their_techniques_alone():
    separate = [mode for mode in bench.MODES.values() if mode.recipes]
    assert [mode.name for mode in separate] == ["barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    assert {mode.recipes for mode in separate} == {("disaggregated",)}
    keys = {"digen.gap.enable", "digen.tsp.enable", "digen.tag.policy", "digen.staleness.max_versions"}
    for mode in separate:
        switched = dict(override.split("=") for override in mode.overrides)
        # tiles of several timesteps are what is compared, not what is given
        assert switched.keys() - {"digen.tsp.steps_per_tile"} == keys
        assert switched["digen.tag.policy"] == ("bts" if "tag" in mode.name else "off")
        assert switched["digen.staleness.max_versions"] == str(int("tcss" in mode.name))
        for technique in ("gap", "tsp"):
            assert switched[f"digen.{technique}.enable"] == str(technique in mode.name).lower()
    assert set(bench.MODES["colocated+tsp"].overrides) <= set(bench.MODES["gap+tsp"].overrides)


def test_medians_leave_the_warm_up_out_and_ratios_are_made_repeat_by_repeat():
    def run(mode: str, repeat: int, step_s: list[float], projection: float = 0.5):
        gradient = {"actor/grad_norm": 2.0, "actor/grad_projection": projection}
        rows = [{"perf/step_s": s, "perf/images_per_s": 10 / s, **gradient} for s in step_s]
        return bench.RunResult(mode, repeat, "nowhere", tuple(rows), wall_s=40.0)

    runs = [
        run("barrier", 0, [9.0, 2.0, 2.2, 2.4]),
        run("gap", 0, [9.0, 1.0, 1.1, 1.2], projection=-0.5),
        run("barrier", 1, [9.0, 4.0, 4.4, 4.8]),  # on a machine half as fast: no ratio notices
        run("gap", 1, [9.0, 2.0, 2.2, 2.4]),
    ]
    found = bench.summarise(runs, num_warm_up=1)
    assert found["barrier"]["s/step"] == pytest.approx((2.4 + 4.0) / 2)
    assert (found["barrier"]["lowest"], found["barrier"]["highest"]) == (2.2, 4.4)
    assert found["gap"]["x barrier"] == pytest.approx(2.0) and found["barrier"]["x barrier"] == 1.0
    assert found["gap"]["images/s"] == pytest.approx((10 / 1.2 + 10 / 2.0) / 2)
    assert (found["barrier"]["gradient gap"], found["gap"]["gradient gap"]) == (0.0, 0.5)
    assert "trainer idle" not in found["gap"]
    shuffled = [runs[0], *random.Random(0).sample(runs[1:], 3)]
    assert bench.summarise(shuffled, num_warm_up=1) == found


@pytest.mark.parametrize("fails_at", [3, 4])
def test_a_run_that_fails_leaves_the_whole_repeats(monkeypatch, tmp_path, capsys, fails_at):
    def run_mode(mode, repeat, out, *, overrides, **work):
        asked.append((mode.name, repeat, overrides))
        if len(asked) == fails_at:
            raise training.RunFailed("no replica is alive")
        (out / f"{len(asked)}").mkdir(parents=True)
        return bench.RunResult(mode.name, repeat, "nowhere", ({"perf/step_s": 2.0},) * 2, wall_s=40.0)

    asked: list = []
    monkeypatch.setattr(bench, "run_mode", run_mode)
    words = ["bench", "--modes", "colocated,gap", "--steps", "2", "--warm-up", "1", "--repeats", "2", "--out"]
    assert main([*words, str(tmp_path / "out"), "--", "a.b=1"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "digen bench: no replica is alive\n" and "bench.json" in shown.out
    assert [name for name, *_ in asked] == ["colocated", "gap", "colocated", "gap"][:fails_at], "interleaved"
    rollout = "actor_rollout_ref.rollout.n_gpus_per_node=1"
    assert asked[0][2] == ("trainer.n_gpus_per_node=2", "a.b=1")
    assert asked[1][2] == ("trainer.n_gpus_per_node=1", rollout, "a.b=1")
    saved = json.loads((tmp_path / "out/bench.json").read_text())
    assert len(saved["runs"]) == 2 and saved["modes"]["gap"]["x colocated"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--modes", "gap,nosuch"), "--modes must be among colocated, "),
        (("--modes", "gap,gap"), "--modes must name a mode once"),
        (("--warm-up", "6"), "--steps must be > --warm-up >= 0"),
        (("--trainer", "0"), "--trainer must be >= 1"),
        (("--out", "."), "--out must be a new or an empty folder"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_run(capsys, words, message):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
