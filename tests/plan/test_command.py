# SPDX-License-Identifier: Apache-2.0
"""`digen plan` as a user runs it."""

import json
import re

import pytest

from tests.tiny_models import build_tiny
from verl_digen import cli
from verl_digen.algorithms.window import draw_window
from verl_digen.config import digen_config
from verl_digen.hardware.devices import Pool
from verl_digen.models import MODELS, load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.published import checkpoint_folder, repositories
from verl_digen.preflight import check
from verl_digen.sampling.recording import trained_latents
from verl_digen.tools.plan.compose import MFU, Words, compose_run, device_of, mfu_of, platform_of, split_words
from verl_digen.tools.plan.output import make_plan, to_text

pytestmark = pytest.mark.slow

WAN_14B = (
    "recipe=digen_flowgrpo",
    "actor_rollout_ref.model.path=Wan-AI/Wan2.1-T2V-14B-Diffusers",
    *("digen.sampling.height_px=480", "digen.sampling.width_px=832", "digen.sampling.num_frames=81"),
)


def digen_plan(*words: str) -> int:
    return cli.main(["plan", *words])


def small(path) -> list[str]:
    sizes = [f"digen.sampling.{side}_px=32" for side in ("height", "width")]
    return ["recipe=digen_flowgrpo", f"actor_rollout_ref.model.path={path}", *sizes]


def test_a_local_folder_is_planned_from_its_own_files(tiny_qwen_image):
    plan = make_plan([*small(tiny_qwen_image), "gpus=2xH100", "trainer.total_training_steps=50"])
    out = to_text(plan)
    assert "2 H100 do both" in out and "FITS" in out and "at 40% of the peak of H100" in out
    hours = re.search(r"50 steps in .*, (\S+) GPU-hours", out)
    assert hours is not None and plan.time.step_s is not None
    assert float(hours[1]) == pytest.approx(plan.time.step_s * 50 * 2 / 3600, rel=0.01)


@pytest.mark.long
def test_wan_14b_at_480x832x81_does_not_fit_8_devices_of_80_gb_and_with_the_remedies_it_does(capsys):
    assert digen_plan(*WAN_14B, "gpus=8", "device=H100", "--json") == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False and plan["device_bytes"] == 80 * 10**9
    assert plan["parameters"]["num_params"] == 14_288_491_584
    assert plan["activations"]["inputs_bytes"] == pytest.approx(
        40 * 32760 * 5120 * 2, rel=0.02
    )  # a hidden state per block
    assert [remedy["fits"] for remedy in plan["remedies"]][-1] is True
    assert plan["remedies"][-1]["override"] == "digen.rollout.max_batch_size=auto"
    more = [word for remedy in plan["remedies"] for word in remedy["override"].split()]
    assert digen_plan(*WAN_14B, "gpus=8", "device=H100", *more, "--json") == 0
    after = json.loads(capsys.readouterr().out)
    assert after["fits"] is True and after["remedies"] == []
    assert after["training"]["total_bytes"] == pytest.approx(plan["remedies"][-1]["training_bytes"], rel=0.01)
    assert after["generating"]["total_bytes"] == pytest.approx(plan["remedies"][-1]["generating_bytes"], rel=0.01)


def test_rows_and_latents_are_those_of_the_runs_windows(tiny_qwen_image, capsys):
    window = ("digen.window.kind=fraction", "digen.window.fraction=0.3", "digen.sampling.num_steps=10")
    digen_plan(*small(tiny_qwen_image), *window, "data.train_batch_size=4", "gpus=1", "gpu_mem=80", "--json")
    plan = json.loads(capsys.readouterr().out)
    config = compose_run([*small(tiny_qwen_image), *window], Words())
    digen = digen_config(config)
    windows = [draw_window(digen.window, run_seed=42, uid=f"p{n:08d}", num_steps=10, step=0) for n in range(4)]
    assert plan["rows_per_sample"] == len(windows[0].train_steps) == 3
    most = max(len(trained_latents(each)) for each in windows)
    assert plan["trajectory_bytes"] == most * 4 * 16 * 4 + 3 * 20 + 4  # [4 tokens, 16 channels] in fp32


def test_a_trajectory_holds_both_parts_of_a_video_with_sound(tiny_ltx2, capsys):
    size = ("digen.sampling.height_px=64", "digen.sampling.width_px=64", "digen.sampling.num_frames=9")
    digen_plan(*small(tiny_ltx2), *size, "digen.sampling.num_steps=4", "gpus=1", "gpu_mem=80", "--json")
    plan = json.loads(capsys.readouterr().out)
    num_rows = plan["rows_per_sample"]
    # 8 tokens of video and 9 of sound, 8 channels, in fp32
    assert plan["trajectory_bytes"] == (num_rows + 1) * (8 + 9) * 8 * 4 + num_rows * 20 + 4


def test_seconds_are_those_of_a_measured_share_of_the_peak_where_there_is_one(tiny_qwen_image, tmp_path):
    plan = make_plan([*small(build_tiny("sd3", tmp_path / "sd3")), "gpus=1", "device=H100"])
    assert plan.mfu == (0.21, 0.21)
    assert plan.time.training_s == pytest.approx(plan.time.training_flops / (0.21 * 989e12))
    assert mfu_of("SD3Transformer2DModel", 8_000_000_000) == MFU, "3.5 large is another network"
    assert mfu_of("QwenImageTransformer2DModel", 20_000_000_000) == (0.15, 0.37)
    words = [*small(tiny_qwen_image), "gpus=1", "device=H100"]
    assert [make_plan([*words, *own]).mfu for own in ([], ["mfu=0.3"])] == [MFU, (0.3, 0.3)]


def test_accelerators_are_planned_as_on_a_machine_that_has_them():
    """The plan does not take the CPU's precision, the default on a machine without accelerators."""
    config = compose_run(["recipe=digen_flowgrpo"], Words(gpus=16))
    assert config.trainer.device == "cuda" and "mixed_precision" not in config.actor_rollout_ref.actor.fsdp_config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    split = compose_run(["recipe=digen_flowgrpo+disaggregated"], Words(gpus=16))
    assert (split.trainer.nnodes, split.trainer.n_gpus_per_node) == (1, 8)
    assert (split.actor_rollout_ref.rollout.nnodes, split.actor_rollout_ref.rollout.n_gpus_per_node) == (1, 8)


def test_the_platform_is_the_machines_own_again_afterwards():
    from verl.plugin.platform import get_platform

    before = get_platform()
    compose_run(["recipe=digen_flowgrpo"], Words(gpus=8))
    assert get_platform() is before


def test_words_are_the_plans_and_overrides_are_hydras():
    words, overrides = split_words(["recipe=a", "gpus=8", "gpu_mem=79.5", "+b.c=1", "~d"])
    assert words == Words(gpus=8, gpu_mem=79.5)
    assert overrides == ["recipe=a", "+b.c=1", "~d"]
    assert split_words(["a+b", "gpus=8"]) == split_words(["recipe=a+b", "gpus=8"])
    assert split_words(["gpus=8xH100"])[0] == Words(gpus=8, device="H100")
    assert split_words(["gpus=2x24GB"])[0] == Words(gpus=2, gpu_mem=24)
    assert split_words(["gpus=1xRTX4090"])[0].types == ("RTX4090", "RTX4090")
    assert split_words(["gpus=4xH20+2xH100"])[0] == Words(pools=(Pool(4, "H20"), Pool(2, "H100")))


@pytest.mark.parametrize("word", ["gpu_mem", "host_mem"])
def test_an_infinite_memory_is_refused(word):
    with pytest.raises(ValueError, match=f"{word} must be > 0 and finite, got inf; e.g."):
        split_words([f"{word}=inf"])


def test_memory_is_the_devices_unless_it_is_given():
    assert device_of(Words(device="H200")) == ("H200", 141 * 10**9)
    assert device_of(Words(device="A100", gpu_mem=40)) == ("A100", 40 * 10**9)


def test_there_is_a_published_checkpoint_of_every_pipeline():
    found = set()
    for repository in repositories():
        with checkpoint_folder(repository) as folder:
            found.add(load_model(folder).pipeline)
    assert found == MODELS.keys()


def test_the_host_has_a_verdict_where_its_memory_is_given(tiny_qwen_image, capsys):
    words = [*small(tiny_qwen_image), "gpus=2", "device=H100"]
    assert digen_plan(*words) == 0
    assert "GB of host memory (calculated); host_mem=1000 compares it" in capsys.readouterr().out
    assert digen_plan(*words, "host_mem=1000") == 0
    assert "FITS THE HOST" in capsys.readouterr().out
    assert digen_plan(*words, "host_mem=0.0001", "--json") == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True and plan["host_fits"] is False
    assert plan["host_needed_bytes"] == sum(plan["host"].values()) > plan["host_bytes"] == 100_000


REFUSED = (
    (
        "digen.tag.policy=bts",
        "actor_rollout_ref.rollout.data_parallel_size=2",
        "actor_rollout_ref.rollout.temperature=0.5",
        "+digen.loss.beta=0.5",
    ),
    ("actor_rollout_ref.model.target_modules=[nothing]", "+actor_rollout_ref.model.unknown=1"),
)
"""Words that break rules of pools, replicas, keys without effect and losses; and rules that read the checkpoint."""


@pytest.mark.parametrize("broken", REFUSED, ids=["config", "model"])
def test_what_a_run_would_refuse_is_refused_with_its_messages(broken, tiny_qwen_image, capsys):
    overrides = [*small(tiny_qwen_image), "actor_rollout_ref.model.lora_rank=8", *broken]
    words = Words(gpus=2, gpu_mem=80)
    assert digen_plan(*overrides, "gpus=2", "gpu_mem=80") == 2
    said = capsys.readouterr().err.removeprefix("digen plan: ").strip().splitlines()
    with platform_of(words), pytest.raises(ValueError) as refused:
        check(compose_run(overrides, words))
    assert len(said) >= len(broken) and set(said) <= set(str(refused.value).splitlines())


@pytest.mark.parametrize("backend", ["nccl", "nixl"])
def test_separate_pools_are_planned_without_the_packages_that_carry_their_weights(backend, tiny_qwen_image, capsys):
    separate = ["recipe=digen_flowgrpo+disaggregated", *small(tiny_qwen_image)[1:]]
    path = () if backend == "nccl" else (f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}",)
    assert digen_plan(*separate, *path, "gpus=2", "device=H100") == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "1 H100 train" in out and "FITS" in out


def test_prompts_and_rewards_are_checked_where_they_are_named(tiny_qwen_image, capsys):
    named = ("data.train_files=nowhere.jsonl", "data.val_files=nowhere.jsonl", "digen.reward.functions={nothing: 1.0}")
    assert digen_plan(*small(tiny_qwen_image), *named, "gpus=1") == 2
    refused = capsys.readouterr().err
    assert "nowhere.jsonl" in refused and "'nothing'" in refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipe=digen_flowgrpo", "gpus=8"), "model.path must be a text, got None; give a checkpoint"),
        (("recipe=digen_flowgrpo", "actor_rollout_ref.model.path=a/b"), "or one of Qwen/Qwen-Image"),
        (("recipe=nope",), "the config cannot be composed: "),
        (("recipe=digen_flowgrpo", "gpus=many"), "gpus must be a number, got 'many' (ValueError: "),
        (("recipe=digen_flowgrpo", "gpus=0"), "gpus must be >= 1, got 0"),
        (("recipe=digen_flowgrpo", "gpus=17"), "gpus must fill nodes of 8 evenly, got 17"),
        (("recipe=digen_flowgrpo+disaggregated", "gpus=7"), "gpus must be even with separate pools, got 7"),
        (("recipe=digen_flowgrpo", "gpus=8", "trainer.nnodes=2"), "gpus must be left out where the pools are given"),
        (("recipe=digen_flowgrpo", "device=H1000"), "device must be one of RTX3090, RTX4090"),
        (("recipe=digen_flowgrpo", "device=CPU"), "device must be one of RTX3090, RTX4090"),
        (("recipe=digen_flowgrpo", "mfu=2"), "mfu must lie in (0, 1], got 2.0"),
        (("recipe=digen_flowgrpo", "prompt_tokens=100000"), "prompt_tokens must lie in [1, 2048], got 100000; no"),
        ((*WAN_14B, "digen.sampling.num_frames=80", "gpus=8"), "num_frames must be 1 plus a multiple of 4"),
        (("digen_flowgrpo", "gpu24"), "words must be KEY=VALUE, got 'gpu24'"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(words, message, capsys):
    assert digen_plan(*words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(("rank", "num_made"), [(0, 1), (4, 2)])
def test_a_network_is_made_once_and_once_more_with_an_adapter(tiny_qwen_image, monkeypatch, rank, num_made):
    made, load = [], DiffusionModel.load_structure
    monkeypatch.setattr(DiffusionModel, "load_structure", lambda model, dtype: made.append(dtype) or load(model, dtype))
    compute = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
    words = [*small(tiny_qwen_image), f"actor_rollout_ref.model.lora_rank={rank}", "gpus=1", "gpu_mem=80"]
    dtypes = [f"++{compute}=bf16", "actor_rollout_ref.rollout.dtype=bfloat16"]
    make_plan([*words, *dtypes])
    assert len(made) == num_made
