# SPDX-License-Identifier: Apache-2.0
"""Cluster runs: the formulas by hand, the order of techniques, the search over splits, and speed."""

import json
from dataclasses import replace
from itertools import pairwise
from math import ceil, floor
from pathlib import Path

import pytest

import verl_digen
from tests.schedulers.flat import changed
from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.cluster import (
    Split,
    assist_s,
    baselines,
    best_baseline,
    ladder,
    run_colocated,
    run_split,
    sample_s,
    simulated_rules,
    steady_window,
    train_s,
)
from verl_digen.tools.simulate.profile import Numbers, Profile, load_profile, parse_profile, profile_names
from verl_digen.tools.simulate.splits import best_split, parse_pool

NUMBERS = Numbers(
    num_prompts=4,
    group_size=8,
    num_steps=10,
    num_trained_steps=9,
    max_chunk_size=8,
    rows_per_tile=4,
    min_trainer_devices=2,
    min_gathering_devices=16,
    step_s=0.1,
    decode_s=0.5,
    row_s=0.4,
    gather_s=0.3,
    score_s=0.2,
    commit_s=1.0,
    switch_s=2.0,
)
PROFILE = Profile("p", "a model", "a setting", "H800", NUMBERS)
TECHNIQUES = ("gap", "tsp", "tag", "tcss")
STRICT = TECHNIQUES[:-1]


def h800(trainer: int, generator: int) -> Split:
    return Split(Pool(trainer, "H800"), Pool(generator, "H800"))


def test_training_time_by_hand():
    # serial: 8 samples on 16 ranks, one each on 8 of them, 9 rows of max(0.4, 2 * 0.3 * 15 / 16)
    assert train_s(NUMBERS, 1, 16, slowdown=1.0, has_tsp=False) == pytest.approx(9 * 0.5625)
    # TSP: 72 rows on 16 ranks, 5 rows at most, in even tiles of 3 and 2
    assert train_s(NUMBERS, 1, 16, slowdown=1.0, has_tsp=True) == pytest.approx(5 * 0.4)
    # a tile of one row is shorter than gathering the next tile's weights
    assert train_s(replace(NUMBERS, num_trained_steps=2), 1, 16, slowdown=1.0, has_tsp=True) == pytest.approx(0.5625)
    # one rank gathers nothing
    assert train_s(NUMBERS, 1, 1, slowdown=1.0, has_tsp=False) == pytest.approx(72 * 0.4)
    assert train_s(NUMBERS, 1, 1, slowdown=1.0, has_tsp=True) == pytest.approx(72 * 0.4)
    # a device with half the speed computes twice as long, and gathers at the same speed
    assert train_s(NUMBERS, 1, 16, slowdown=2.0, has_tsp=True) == pytest.approx(5 * 0.8)


def test_generation_time_by_hand():
    assert sample_s(NUMBERS, 1.0) == pytest.approx(10 * 0.1 + 0.5)
    # gathering sharded weights takes longer than computing: 0.3 * 3 / 4 > 0.1
    assert assist_s(NUMBERS, 3, 4, 1.0) == assist_s(NUMBERS, 4, 4, 1.0) == pytest.approx(10 * 0.225 + 0.5)
    # a rank's three samples are denoised together, which takes longer than gathering
    assert assist_s(NUMBERS, 12, 4, 1.0) == pytest.approx(10 * 0.3 + 3 * 0.5)
    assert assist_s(NUMBERS, 1, 1, 1.0) == sample_s(NUMBERS, 1.0)
    # 16 ranks keep the weights, which the first step gathers: 0.3 * 15 / 16 > 0.1
    assert assist_s(NUMBERS, 16, 16, 1.0) == pytest.approx(0.28125 + 9 * 0.1 + 0.5)
    assert assist_s(NUMBERS, 17, 16, 2.0) == pytest.approx(2 * (10 * 0.2 + 2 * 0.5))


def test_a_colocated_step_by_hand():
    # 32 samples on 16 devices: 2 rounds of 1.5 s; 0.2; 2.0; 2 samples of 9 rows of 0.5625 s each; 1.0
    run = run_colocated(PROFILE, Pool(16, "H800"), has_tsp=False)
    assert run.step_s == pytest.approx(3.0 + 0.2 + 2.0 + 18 * 0.5625 + 1.0)
    assert run.idle["all"] == pytest.approx(2.2 / run.step_s)


def test_what_does_not_divide_is_not_rounded_away_by_hand():
    """On both sides the fullest device counts."""
    qwen = load_profile("qwen-image-20b")
    # colocated on 1,000 devices: 512 samples are one round; 4,608 rows are 5 on the fullest rank, in tiles of 3 and 2
    gathers_s = 2 * 0.255 * 999 / 1000
    training_s = 3 * 0.2523 + max(2 * 0.2523, gathers_s)
    run = run_colocated(qwen, Pool(1000, "H800"), has_tsp=True)
    # the ranks generate: weights are gathered in the first step alone, and nothing moves to the host and back (1.632 s)
    assert run.step_s == pytest.approx(gathers_s / 2 + 9 * 0.08409 + 0.01259 + 0.2 + training_s + 0.00406)
    dear = replace(qwen, numbers=replace(qwen.numbers, min_gathering_devices=1001, gather_s=0.5))
    run = run_colocated(dear, Pool(1000, "H800"), has_tsp=True)  # gathered in each of 10 steps: dearer than moving
    training_s = train_s(dear.numbers, dear.numbers.num_prompts, 1000, slowdown=1.0, has_tsp=True)
    assert run.step_s == pytest.approx(10 * 0.08409 + 0.01259 + 1.632 + 0.2 + training_s + 0.00406)
    # 48 groups of 24 on 20 replicas: 12 chunks of 2 each, 576 chunks, 29 on the fullest replica; not 28.8
    numbers = replace(NUMBERS, num_prompts=48, group_size=24)
    barrier = run_split(replace(PROFILE, numbers=numbers), h800(7, 20), (), num_steps=5)
    training_s = train_s(numbers, 48, 7, slowdown=1.0, has_tsp=False)
    assert training_s == pytest.approx(165 * 9 * 2 * 0.3 * 6 / 7)  # 1,152 samples on 7 ranks: 165, not 164.6
    assert barrier.step_s == pytest.approx(29 * 2 * 1.5 + 0.2 + training_s + 1.0)


@pytest.mark.parametrize(
    ("ahead", "window"),
    [([0.0, 0.0, 0.0, 0.0], (1, 3)), ([9.0, 4.0, 5.0, 6.0, 4.0, 5.0], (1, 4)), ([9.0, 4.0, 8.0, 8.0], (2, 3))],
)
def test_steps_are_counted_between_commits_with_as_much_generated_ahead(ahead, window):
    assert steady_window(ahead) == window


def test_a_window_that_used_up_more_than_it_generated_is_charged_for_it():
    """Slots that fall behind with stale generation: fewer samples are begun early at every commit."""
    profile, split = load_profile("wan2.1-14b"), h800(40, 3)
    short = run_split(profile, split, ("gap", "tsp", "tcss"), num_steps=4)
    num_samples = profile.numbers.num_prompts * profile.numbers.group_size
    assert short.step_s >= num_samples * sample_s(profile.numbers, 1.0) / 3 * (1 - 1e-9)


def test_two_pools_of_one_type_are_compared_with_all_devices_together_and_two_types_with_either_alone_too():
    assert [(run.name, run.devices) for run in baselines(PROFILE, [Pool(4, "H800"), Pool(8, "H800")])] == [
        ("colocated", "12xH800 together"),
        ("colocated+tsp", "12xH800 together"),
    ]
    mixed = baselines(PROFILE, [Pool(4, "H800"), Pool(1, "H20")])
    assert [(run.name, run.devices) for run in mixed] == [
        ("colocated", "5 together, as H20"),
        ("colocated+tsp", "5 together, as H20"),
        ("colocated", "4xH800 alone"),  # one H20 alone does not hold the training state
        ("colocated+tsp", "4xH800 alone"),
    ]
    assert mixed[1].step_s == run_colocated(PROFILE, Pool(5, "H20"), has_tsp=True).step_s
    barrier = run_split(PROFILE, Split(Pool(4, "H800"), Pool(1, "H20")), (), num_steps=5)
    overlapped = run_split(PROFILE, Split(Pool(4, "H800"), Pool(1, "H20")), ("gap", "tsp"), num_steps=5)
    assert best_baseline([*mixed, barrier, overlapped]) is min([*mixed, barrier], key=lambda run: run.step_s)


@pytest.mark.parametrize("name", profile_names())
def test_the_default_chunk_of_an_assist_is_as_good_as_the_best_there_is(name):
    """A split of 32 devices in which the trainer has time to assist."""
    profile, split = load_profile(name), h800(24, 8)
    rules = simulated_rules(profile, split, STRICT)

    def step_s(size: int | None) -> float:
        return run_split(profile, split, STRICT, num_steps=4, rules=changed(rules, assist_chunk_size=size)).step_s

    group_size = profile.numbers.group_size
    assert step_s(None) <= 1.03 * min(step_s(size) for size in (1, 3, group_size // 2, group_size))


def test_a_barrier_step_by_hand():
    # 32 samples in chunks of one on 8 slots: 4 rounds of 1.5 s; scores 0.2; 32 samples on 8 ranks, 4 each of 9 rows
    run = run_split(PROFILE, h800(8, 8), (), num_steps=5)
    row_s = max(0.4, 0.6 * 7 / 8)
    assert run.step_s == pytest.approx(6.0 + 0.2 + 4 * 9 * row_s + 1.0)
    assert run.idle["generator"] == pytest.approx(1 - 6.0 / run.step_s)
    assert run.idle["trainer"] == pytest.approx(6.2 / run.step_s)


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("num_trainer", [8, 16, 24])
def test_no_technique_makes_a_step_longer_by_more_than_1_percent_with_a_shipped_profile(name, num_trainer):
    profile = load_profile(name)
    runs = [
        run_split(profile, h800(num_trainer, 32 - num_trainer), chosen, num_steps=6) for chosen in ladder(TECHNIQUES)
    ]
    assert [run.name for run in runs] == ["barrier", "gap", "gap+tsp", "gap+tsp+tag", "gap+tsp+tag+tcss"]
    for slow, fast in pairwise(runs):
        assert fast.step_s <= slow.step_s * 1.01, (slow.name, fast.name)
    assert runs[-1].step_s < 0.9 * runs[0].step_s
    for run in runs:
        assert all(0 <= share <= 1 for share in run.idle.values())
        assert (run.stale > 0) <= ("tcss" in run.name)
        assert (run.assisted > 0) <= ("tag" in run.name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_split(PROFILE, h800(2, 8), (), num_steps=3), "--steps must be > 3.*got 3"),
        (lambda: best_split(PROFILE, Pool(2, "H800"), (), num_steps=5), "--devices must be > 2.*got 2"),
        (lambda: parse_pool("--trainer", "many", default_device="H800"), "--trainer must be a number.*got 'many'"),
        (lambda: parse_pool("--trainer", "8x", default_device="H800"), "--trainer must be a number.*got '8x'"),
        (lambda: parse_pool("--trainer", "0xH20", default_device="H800"), "--trainer must be a number.*got '0xH20'"),
        (
            lambda: parse_pool("--trainer", "8xTPU", default_device="H800"),
            "type of --trainer must be one of .*got 'TPU'",
        ),
    ],
)
def test_bad_input_is_told_by_its_option(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pool_is_written_as_it_is_read():
    assert str(parse_pool("--trainer", "16xH20", default_device="H800")) == "16xH20"
    assert parse_pool("--trainer", "16", default_device="H800") == Pool(16, "H800")


# -- profiles: shipped ones agree with their own formulas, and invalid ones are reported ---------------------
FOLDER = Path(verl_digen.__file__).parent / "profiles"
MEASURED = "sd3.5-medium"
CALCULATED = [name for name in profile_names() if name != MEASURED]


def raw(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CALCULATED)
def test_every_number_says_where_it_comes_from_and_none_claims_to_be_measured(name):
    data = raw(name)
    for key, entry in {**data["inputs"], **data["numbers"]}.items():
        kind = entry["source"].partition(":")[0]
        assert kind in ("published", "derived", "chosen"), key
        assert "measured" not in entry["source"], key
    for key, entry in data["numbers"].items():
        if key.endswith("_s") and key != "score_s":
            assert entry["source"].startswith("derived:"), f"{key} is a guess"


def test_the_measured_profile_gives_the_measured_step():
    data = raw(MEASURED)
    given = {key: entry["value"] for key, entry in data["inputs"].items()}
    numbers = load_profile(MEASURED).numbers
    drawn_s = numbers.num_steps * numbers.step_s + numbers.decode_s
    assert given["num_pictures"] * drawn_s == pytest.approx(given["generate_s"], rel=1e-3)
    assert given["num_rows"] * numbers.row_s == pytest.approx(given["train_s"], rel=1e-3)
    text = (Path(__file__).parents[2] / "docs" / "gpu_results.md").read_text()
    assert f"| {given['generate_s']} s | {given['train_s']} s |" in text


@pytest.mark.parametrize("name", CALCULATED)
def test_derived_numbers_follow_from_their_inputs(name):
    data = raw(name)
    given = {key: entry["value"] for key, entry in data["inputs"].items()}
    numbers = {key: entry["value"] for key, entry in data["numbers"].items()}
    forward_tflop = 1e-12 * (
        2 * given["weights_per_token"] * given["tokens"] + 4 * given["layers"] * given["width"] * given["tokens"] ** 2
    )
    effective_tflops = given["utilisation"] * given["peak_tflops"]
    num_devices = max(1, ceil(given["state_bytes_per_param"] * given["params"] / (0.6 * 80e9)))
    published_bytes = 2 * given["published_params"]
    state_bytes = given["state_bytes_per_param"] * given["published_params"]
    decode_tflop = given["decode_tflop_per_megapixel"] * given["megapixels"]
    expected = {
        "step_s": given["branches"] * forward_tflop / effective_tflops,
        "row_s": given["branches"] * given["row_forwards"] * forward_tflop / effective_tflops,
        "decode_s": decode_tflop / (given["decode_utilisation"] * given["peak_tflops"]),
        "gather_s": 2 * given["params"] / (given["gather_gb_per_s"] * 1e9),
        "min_trainer_devices": num_devices,
        "min_gathering_devices": max(
            1, ceil(given["state_bytes_per_param"] * given["params"] / (80e9 - 2 * given["params"] / 0.6))
        ),
        "commit_s": published_bytes / (given["network_gb_per_s"] * 1e9) + state_bytes / (num_devices * 3.35e12),
        "switch_s": 2 * 2 * given["params"] / (given["host_gb_per_s"] * 1e9),
    }
    if name in ("flux1-12b", "hunyuanvideo-13b"):
        expected["num_trained_steps"] = floor(0.6 * (numbers["num_steps"] - 1))
    else:
        expected["num_trained_steps"] = numbers["num_steps"] - 1
    assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-3)


def test_a_file_is_a_profile_too(tmp_path):
    data = raw("flux1-12b")
    data["numbers"]["step_s"] = {"value": 0.5, "source": "published: my cluster"}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    profile = load_profile(str(tmp_path / "mine.json"))
    assert (profile.name, profile.numbers.step_s) == ("mine", 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(device="TPU"), "device of profile p must be one of RTX3090.*got 'TPU'"),
        (lambda data: data["numbers"].pop("row_s"), "profile p must have the numbers .* missing 1 .*'row_s'"),
        (
            lambda data: data["numbers"].update(row_s=1.0),
            "row_s of profile p must have a value, and a source .*, got 1.0",
        ),
        (lambda data: data["numbers"]["row_s"].update(value=-1), "profile p: row_s must be >= 0 and finite, got -1"),
        (
            lambda data: data["numbers"]["group_size"].update(value=2.5),
            "group_size must be >= 1, got 2.5; give a whole",
        ),
        (lambda data: data["numbers"]["step_s"].update(value=0), "profile p: step_s must be > 0 and finite, got 0"),
        (lambda data: data["numbers"]["num_trained_steps"].update(value=99), "trained steps .* profile p, got 99"),
        (lambda data: data["numbers"]["row_s"].update(source="I think"), "row_s of profile p must .* got .*'I think'"),
    ],
)
def test_a_wrong_profile_is_told_by_its_field(change, message):
    data = raw("flux1-12b")
    change(data)
    with pytest.raises(ValueError, match=message):
        parse_profile("p", json.dumps(data))
