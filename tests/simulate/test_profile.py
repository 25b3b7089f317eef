# SPDX-License-Identifier: Apache-2.0
"""Profiles: shipped ones agree with their own formulas, and invalid ones are reported."""

import json
from math import ceil, floor
from pathlib import Path

import pytest

import verl_digen
from verl_digen.simulate.profile import load_profile, parse_profile, profile_names

FOLDER = Path(verl_digen.__file__).parent / "profiles"
SHIPPED = profile_names()


def raw(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_says_where_it_comes_from_and_none_claims_to_be_measured(name):
    data = raw(name)
    for key, entry in {**data["inputs"], **data["numbers"]}.items():
        kind = entry["source"].partition(":")[0]
        assert kind in ("published", "derived", "chosen"), key
        assert "measured" not in entry["source"], key
    for key, entry in data["numbers"].items():
        if key.endswith("_s") and key != "score_s":
            assert entry["source"].startswith("derived:"), f"{key} is a guess"


@pytest.mark.parametrize("name", SHIPPED)
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


@pytest.mark.parametrize(
    ("name", "tokens", "weights_per_token", "megapixels"),
    [
        ("flux1-12b", (720 // 16) ** 2 + 512, 57 * 12 * 3072**2, 720 * 720 / 1e6),
        ("qwen-image-20b", (512 // 16) ** 2 + 128, 60 * 12 * 3072**2, 512 * 512 / 1e6),
        ("hunyuanvideo-13b", 14 * (480 // 16) ** 2 + 256, 60 * 12 * 3072**2, 53 * 480 * 480 / 1e6),
        ("wan2.1-14b", 9 * 15 * 26, 40 * (6 * 5120**2 + 2 * 5120 * 13824), 33 * 240 * 416 / 1e6),
    ],
)
def test_inputs_follow_from_the_architecture(name, tokens, weights_per_token, megapixels):
    given = {key: entry["value"] for key, entry in raw(name)["inputs"].items()}
    assert given["tokens"] == tokens
    assert given["weights_per_token"] == weights_per_token
    assert given["megapixels"] == pytest.approx(megapixels)
    assert given["weights_per_token"] < given["params"]


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
        (lambda data: data["numbers"].pop("row_s"), "numbers of profile p must be .*got 'row_s'"),
        (lambda data: data["numbers"].update(row_s=1.0), "row_s of profile p must have a value and a source, got 1.0"),
        (lambda data: data["numbers"]["row_s"].update(value=-1), "row_s of profile p must be seconds >= 0, got -1"),
        (lambda data: data["numbers"]["group_size"].update(value=2.5), "group_size .* a whole number >= 1, got 2.5"),
        (lambda data: data["numbers"]["row_s"].update(source="I think"), "source of row_s .* got 'I think'"),
    ],
)
def test_a_wrong_profile_is_told_by_its_field(change, message):
    data = raw("flux1-12b")
    change(data)
    with pytest.raises(ValueError, match=message):
        parse_profile("p", json.dumps(data))
