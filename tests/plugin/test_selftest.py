# SPDX-License-Identifier: Apache-2.0
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.tiny_models import build_tiny
from verl_digen.cli import main
from verl_digen.models import load_model
from verl_digen.tools.checkup.selftest import PROMPTS, Check, check_model


@pytest.mark.parametrize(
    ("name", "num_checks"),
    [
        *(("z_image", 3), ("wan2.2_a14b", 4), ("qwen_image_edit", 3), ("flux_kontext", 3), ("flux2_klein", 3)),
        *(("wan2.1_i2v", 3), ("hunyuan_video15_i2v", 3), ("ltx2", 3)),
    ],
)
def test_the_selftest_prints_a_line_per_check_and_passes_here(name, num_checks, capsys):
    assert main(["doctor", "--selftest", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == num_checks and all(line.startswith("ok ") and "at most" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--skip", "sleep"], "--gpu must be given with the options of its checks, got '--skip'; add it"),
        (["--full", "--budget", "9"], "--gpu must be given with the options of its checks, got '--full --budget'"),
        (["--selftest", "sd3", "--architecture", "sd3"], "got '--architecture'"),
        (["--selftest", "sd3", "--gpu"], "--selftest must be left out with --gpu, got 'sd3'; --only numerics --arch"),
    ],
)
def test_no_option_of_the_doctor_is_ignored(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_numbers_of_a_selftest_are_json_too(capsys):
    assert main(["doctor", "--selftest", "sd3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "sd3" and found["checks"]
    assert all(check["holds"] and check["value"] <= check["bound"] for check in found["checks"])


def test_a_sampler_that_does_something_else_than_the_pipeline_fails(tmp_path):
    model = load_model(build_tiny("sd3", tmp_path / "checkpoint"))
    model.spec = replace(model.spec, selftest={"guidance_scale": 2.0})
    guided = next(check_model(model))
    assert not guided.holds and str(guided).startswith("FAIL")


def test_a_pipeline_that_pads_prompts_of_a_batch_without_a_mask_is_asked_one_by_one(tmp_path, monkeypatch):
    model = load_model(build_tiny("sd3", tmp_path / "checkpoint"))

    def alone(pipeline, geometry):
        return lambda **given: pipeline(**given) if len(given["latents"]) == 1 else pytest.fail("a batch")

    monkeypatch.setattr(model, "pipeline_call", alone)
    assert next(check_model(model)).holds


def test_a_network_that_cannot_mask_padding_is_given_one_prompt(tmp_path):
    model = load_model(build_tiny("z_image", tmp_path / "checkpoint"))
    model.__class__ = type("Apart", (type(model),), {"keeps_lengths_apart": True})
    assert all(check.holds for check in check_model(model))


def test_prompts_of_the_selftest_differ_in_length_where_a_pipeline_pads_to_16_tokens(tmp_path):
    tokenizer = load_model(build_tiny("z_image", tmp_path / "checkpoint")).load_tokenizer("tokenizer")
    short, long = (len(tokenizer(prompt).input_ids) for prompt in PROMPTS)
    assert short < 16 < long


def test_parameters_without_a_finite_gradient_are_named(tmp_path, monkeypatch):
    model = load_model(build_tiny("sd3", tmp_path / "checkpoint"))
    load = model.load_transformer

    def broken(dtype):
        network = load(dtype)
        if dtype == torch.bfloat16:
            network.proj_out.bias.register_hook(lambda gradient: gradient * math.nan)
        return network

    monkeypatch.setattr(model, "load_transformer", broken)
    *_, gradient = check_model(model, dtype=torch.bfloat16)
    assert not gradient.holds and re.search(r"not finite in 1 of \d+ parameters: proj_out.bias$", str(gradient))


@pytest.mark.parametrize("value", [math.nan, math.inf, 2e-5])
def test_a_number_beyond_its_bound_fails(value):
    assert not Check("x", value, 1e-5).holds


@pytest.mark.parametrize(("name", "said"), [("?", "got '?'; choose"), ("wan2.3", "did you mean wan2.1?"), ("", "''")])
def test_an_unknown_model_is_answered_with_the_list(capsys, name, said):
    assert main(["doctor", "--selftest", name]) == 2
    err = capsys.readouterr().err
    assert "must be one of flux2_klein, flux_dev, " in err and said in err


def test_a_fault_of_the_model_keeps_its_traceback(capsys, monkeypatch):
    def fail(name):
        raise ValueError("of the network")

    monkeypatch.setattr("verl_digen.tools.checkup.selftest.run_selftest", fail)
    assert main(["doctor", "--selftest", "sd3"]) == 1 and "Traceback" in capsys.readouterr().err


def test_an_unknown_model_is_told_before_anything_heavy_is_imported():
    code = "import sys; from verl_digen.cli import main; main(['doctor', '--selftest', '?']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "must be one of" in done.stderr and not {"torch", "diffusers"} & set(done.stdout.split())
