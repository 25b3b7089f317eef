# SPDX-License-Identifier: Apache-2.0
"""Each check of `digen doctor --gpu` in this process: it passes here, and fails where what it is for is broken.

The same functions run on the pretend accelerator.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.grid import IN_GRID
from tests.pretend.process import on_pretend
from verl_digen.engine import gradients
from verl_digen.engine.transaction import GradientTransaction
from verl_digen.models import sd3
from verl_digen.models.tiny import BUILDERS, build_tiny
from verl_digen.observe.run_files import METRICS
from verl_digen.patches import attention_gradient
from verl_digen.tools.checkup import device, gradient, selftest, training, weights
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.tools.checkup.command import read_figures
from verl_digen.trainer.run_output import append_metrics
from verl_digen.weights.receiver import Update
from verl_digen.weights.sending import own_device

CPU = torch.device("cpu")
SIZE_MB = 64


def setting(folder: Path) -> Setting:
    return Setting(folder, num_devices=1, architecture="sd3")


def in_a_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


# -- numerics -----------------------------------------------------------------------------------------------
def test_the_self_test_holds_in_both_dtypes(tmp_path: Path):
    figure = selftest.check_numerics(setting(tmp_path))
    assert figure.startswith("sd3: 6 numbers hold") and "in float32" in figure and "in bfloat16" in figure


def test_the_self_test_runs_the_kernels_of_a_run_and_rounds_no_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before, seen = torch.get_float32_matmul_precision(), set()

    def look(*_: Any) -> None:
        cudnn = torch.backends.cudnn
        seen.add((cudnn.enabled, cudnn.allow_tf32, torch.get_float32_matmul_precision()))

    torch.set_float32_matmul_precision("high")
    hook = register_module_forward_pre_hook(look)
    try:
        selftest.check_numerics(setting(tmp_path))
    finally:
        hook.remove()
        torch.set_float32_matmul_precision(before)
    assert seen == {(True, False, "highest")}


def test_a_network_that_computes_something_else_in_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    predict = sd3.StableDiffusion3.predict

    def off(self, transformer, latents, *args):
        scale = 1.001 if torch.is_inference_mode_enabled() or not torch.is_grad_enabled() else 1.0
        return predict(self, transformer, latents * scale, *args)

    monkeypatch.setattr(sd3.StableDiffusion3, "predict", off)
    with pytest.raises(CheckFailed, match=r"sampler with eta = 0 against .* in float32: "):
        selftest.check_numerics(setting(tmp_path))


def test_an_architecture_that_fails_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selftest, "ProcessPoolExecutor", lambda number, **rest: ThreadPoolExecutor(number))
    given = replace(setting(tmp_path), architecture="sd4", is_cpu=True)
    with pytest.raises(CheckFailed, match=r"^sd4: ValueError: unknown tiny checkpoint 'sd4'"):
        selftest.check_architectures(given)
    assert read_figures(tmp_path)[0]["fails"].startswith("ValueError: unknown tiny")


def test_an_architecture_that_these_packages_do_not_have_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selftest, "ProcessPoolExecutor", lambda number, **rest: ThreadPoolExecutor(number))
    monkeypatch.setattr(selftest, "BUILDERS", {"sd5": "", "sd6": ""})
    monkeypatch.setitem(BUILDERS, "sd5", "diffusers.pipelines.sd5:make")
    monkeypatch.setattr(selftest, "_test", lambda name: name if name == "sd6" else build_tiny(name, tmp_path / name))
    assert (
        selftest.check_architectures(replace(setting(tmp_path), is_cpu=False))
        == "1 architectures hold in fp32 and bf16"
    )
    skipped = {entry["what"]: entry.get("skipped", "") for entry in read_figures(tmp_path)}
    assert skipped == {"sd5": "ModuleNotFoundError: No module named 'diffusers.pipelines.sd5'", "sd6": ""}


# -- attention ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_dense", [pytest.param(True, marks=IN_GRID), False])
def test_a_kernel_that_reads_a_second_layout_as_the_first_fails_without_dense_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dense: bool
):
    attend, plans = functional.scaled_dot_product_attention, dict[Any, Any]()

    def as_cudnn(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def read(gradient: Tensor) -> Tensor:
            planned = plans.setdefault((query.shape, kwargs["attn_mask"] is None), gradient.stride())
            return gradient if gradient.stride() == planned else gradient.flip(-1)

        found = attend(query, *args, **kwargs)
        found.register_hook(read)
        return found

    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda query, **rest: as_cudnn(query, **rest))
    if is_dense:
        assert device.check_attention(setting(tmp_path)).startswith("gradients of attention differ by at most ")
        return
    monkeypatch.setattr(attention_gradient._DenseGradient, "backward", staticmethod(lambda ctx, gradient: gradient))
    with pytest.raises(CheckFailed, match=r"gradient is off by width 64: 1\..e\+00, width 64, masked: .*at most 0\.02"):
        device.check_attention(setting(tmp_path))


# -- gradient -----------------------------------------------------------------------------------------------


def test_a_gradient_that_deferring_changes_fails(
    one_rank: None, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
):
    make = GradientTransaction.__init__

    def scaled(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.loss_factor *= 1.001 if self.reduce == "batch" else 1

    monkeypatch.setattr(GradientTransaction, "__init__", scaled)
    gap = gradient.gradient_gap(tiny_qwen_image)
    with pytest.raises(CheckFailed, match=r"on 2 rank\(s\) .* differs from that reduced at every tile by 1\.0e-03 of"):
        gradient.conclude([0.0, gap])


def test_a_gradient_that_is_never_reduced_fails(one_rank: None, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gradients, "reduce_pending", gradients.drop)
    gap = gradient.gradient_gap(tiny_qwen_image)
    with pytest.raises(CheckFailed, match="by nan of its norm"):
        gradient.conclude([gap, 0.0])


# -- update -------------------------------------------------------------------------------------------------


def test_a_number_that_changes_on_the_way_fails(monkeypatch: pytest.MonkeyPatch):
    take = Update.take

    def corrupt(self, bucket):
        bucket[-1][1].view(-1)[7] += 1
        take(self, bucket)

    monkeypatch.setattr(Update, "take", corrupt)
    with pytest.raises(
        CheckFailed, match=r"a live update of 64 MiB: a weight update with checksum .* did not reach the network"
    ):
        weights.round_trips(SIZE_MB, in_a_thread)


def test_a_receiver_that_dies_is_the_cause(monkeypatch: pytest.MonkeyPatch):
    def no_room(*args):
        raise torch.OutOfMemoryError("no room for the network")

    monkeypatch.setattr(weights, "receive", no_room)
    with pytest.raises(CheckFailed, match="a live update of 64 MiB: no room for the network"):
        weights.round_trips(SIZE_MB, in_a_thread)


# -- sleep --------------------------------------------------------------------------------------------------


def test_numbers_that_do_not_come_back_fail(monkeypatch: pytest.MonkeyPatch):
    def restore(self):
        for storage, num_bytes in self._released:
            UntypedStorage.resize_(storage, num_bytes)
            storage.fill_(0)

    monkeypatch.setattr(weights.DeviceMemory, "restore", restore)
    with pytest.raises(CheckFailed, match="weights that no update replaces have other numbers"):
        weights.sleep_and_wake(4 * SIZE_MB, CPU)


MAIN = """
import json, pathlib, sys
folder, rows = pathlib.Path(sys.argv[1]), [{"step": 0, "val/reward": 0.1}]
print(*(f"line {number}" for number in range(100)), sep="\\n")
rows += [{"step": step, "perf/step_s": 2.0} for step in range(1, 1 + int(sys.argv[2]))]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
sys.exit(int(sys.argv[3]))
"""
"""Stands in for verl's main: FOLDER STEPS CODE."""


@pytest.mark.parametrize(("exit_code", "num_done"), [(0, 2), (1, 2), (0, 1)])
def test_a_run_is_verls_main_and_one_without_its_steps_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, num_done: int
):
    def command_of(*given):
        commands.append(real(*given))
        return [sys.executable, "-c", MAIN, str(given[-1]), str(num_done), str(exit_code)]

    commands, real, run_dir = [], training.command_of, tmp_path / "run"
    monkeypatch.setattr(training, "command_of", command_of)
    if (exit_code, num_done) == (0, 2):
        steps = training.train("digen_quickstart", ("trainer.logger=[console]",), 2, run_dir)
        assert [row["step"] for row in steps] == [1, 2]
        assert commands[0][1:4] == ["-m", "verl.trainer.main_ppo", "recipe=digen_quickstart"]
        assert commands[0].index("trainer.logger=[]") < commands[0].index("trainer.logger=[console]")
        assert {"trainer.total_training_steps=2", f"trainer.default_local_dir={run_dir}"} <= {*commands[0]}
        return
    with pytest.raises(training.RunFailed) as told:
        training.train("digen_quickstart", (), 2, run_dir)
    text = str(told.value)
    assert text.startswith(f"exit code {exit_code}, {num_done} of 2 steps were done; ")
    assert str(run_dir / "console.log") in text
    assert text.endswith("line 99") and "line 80" in text and "line 79" not in text


# -- training: the run itself is in test_command.py ---------------------------------------------------------------
def test_steps_without_a_gradient_or_with_other_rewards_fail():
    step = {
        "actor/grad_norm": 0.3,
        "actor/num_skipped_updates": 0,
        "perf/step_s": 2.0,
        "rollout/log_prob_gap_max": 1e-6,
        "reward/mean": 0.5,
    }
    skipped = step | {"actor/grad_norm": float("inf"), "actor/num_skipped_updates": 1}
    assert training.conclude([skipped, step, step], 1).startswith("3 steps"), "fp16 looks for its loss scale"
    assert training.conclude([step] * 3, 2) == "3 steps on 2 device(s) in 2.0, 2.0, 2.0 s; log-probs differ by 1e-06"
    without = {name: value for name, value in step.items() if name != training.GAP}
    assert training.conclude([without], 1).endswith("the objective has no log-probs"), "DiffusionNFT"
    for steps in ([skipped] * 3, [*[step] * 2, step | {"actor/grad_norm": float("nan")}]):
        with pytest.raises(CheckFailed, match="3 steps with a gradient were due, got gradient norms"):
            training.conclude(steps, 2)
    assert training.conclude([step] * 2, 1, (0.504, 0.495)).endswith("; rewards 0.5000, 0.5000")
    with pytest.raises(CheckFailed, match=r"rewards must be 0\.5040, 0\.4800, got 0\.5000, 0\.5000"):
        training.conclude([step] * 2, 1, (0.504, 0.48))


def test_a_run_that_ends_is_told_with_what_it_noted_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(recipe, overrides, num_steps, run_dir):
        run_dir.mkdir()
        append_metrics(run_dir / METRICS, 1, {"perf/step_s": 2.0, "reward/mean": 0.5})
        raise training.RunFailed("exit code 1, 1 of 3 steps were done; RunStopped: no replica is alive")

    monkeypatch.setattr(training, "train", fails)
    (folder := tmp_path / "training").mkdir()
    with pytest.raises(CheckFailed, match="verl's main: exit code 1, 1 of 3 steps were done; RunStopped"):
        training.check_run(setting(folder))
    assert read_figures(folder) == [{"what": "step 1", "perf/step_s": 2.0, "reward/mean": 0.5}]


# -- on the pretend accelerator ------------------------------------------------------------------------------
def _all_on_the_device(path: Path, folder: Path) -> tuple[str, ...]:
    given = setting(folder)
    weights.ASLEEP_MB = 2 * SIZE_MB
    dist.init_process_group("cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    gap = gradient.gradient_gap(path)
    return (
        selftest.check_numerics(given),
        device.check_attention(given),
        gradient.conclude([gap]),
        weights.round_trips(SIZE_MB, in_a_thread),
        weights.check_sleeping(given),
    )


def test_the_checks_run_on_an_accelerator(tiny_qwen_image: Path, tmp_path: Path):
    figures = on_pretend(_all_on_the_device, tiny_qwen_image, tmp_path)
    starts = (
        "sd3: 6 numbers hold",
        "gradients of attention ",
        "1 rank(s) on ",
        "64 MiB by shared memory: live ",
        "128 MiB asleep in ",
    )
    assert all(figure.startswith(start) for figure, start in zip(figures, starts, strict=True)), figures
    assert "deferred and immediate gradient differ by " in figures[2] and "GB/s, staged " in figures[3]


def _leaking_server(folder: Path) -> str:
    release = weights.DeviceMemory.release

    def keep_one(self, **replaced):
        if len(self._modules) > 2:  # the server's: transformer, encoders, VAE
            self._modules = self._modules[:-1]
        return release(self, **replaced)

    weights.DeviceMemory.release, weights.ASLEEP_MB = keep_one, 2 * SIZE_MB
    with pytest.raises(CheckFailed) as failed:
        weights.check_sleeping(setting(folder))
    return str(failed.value)


def test_a_server_that_keeps_its_decoder_fails(tmp_path: Path):
    assert on_pretend(_leaking_server, tmp_path).startswith("device memory of a sleeping server: ")


def _memory_stays() -> str:
    weights.DeviceMemory.release = lambda self, replaced=tuple: 0
    with pytest.raises(CheckFailed) as failed:
        weights.sleep_and_wake(2 * SIZE_MB, own_device())
    return str(failed.value)


def test_memory_that_stays_fails():
    assert on_pretend(_memory_stays).startswith("device memory asleep: 134.2 MB where 0.0 MB were due")
