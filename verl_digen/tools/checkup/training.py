# SPDX-License-Identifier: Apache-2.0
"""Steps of real runs through verl's main: Ray, TransferQueue, FSDP2, replicas, weight updates.

The models of `TRUE_SIZES` run in their published size with random weights, beside what `digen plan` says of the same
words: the transformer's weights are drawn where it is loaded (`models.checkpoint`); weights of encoders and VAE are
written. `python -m verl_digen.tools.checkup.training` prints the devices of `make quickstart`.
"""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.plugin.platform import get_platform

from verl_digen.hardware.torch_support import accelerator_support
from verl_digen.models.checkpoint import RANDOM_MARKER, draw_weight
from verl_digen.models.published import write_configs
from verl_digen.models.tiny import build_tiny
from verl_digen.observe.run_files import LOG, METRICS, read_lines
from verl_digen.tools.checkup.checks import CheckFailed, Setting

REWARD_TOLERANCE = 0.01
"""Difference that other kernels may make: a reward is a mean over 96 pictures, each of which can flip a step."""
FP32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
)
GAP = "rollout/log_prob_gap_max"
NOTED = (
    *("perf/step_s", "perf/generate_s", "perf/train_s", "perf/sync_s", "perf/overhead_s", "perf/images_per_s"),
    *("perf/mfu/trainer", "perf/mfu/generator", GAP, "actor/grad_norm", "reward/mean"),
    *("actor/num_tiles", "actor/recomputed_share", "actor/num_skipped_updates", "rollout/weight_load_s_max"),
    *("actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb", "actor/perf/cpu_memory_used_gb"),
)
"""Metrics of a step that are noted where they are there."""
GROUPS_OF_16 = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=16", "digen.rollout.max_batch_size=32")
SMALL = (
    *("digen.sampling.height_px=64", "digen.sampling.width_px=64", "digen.sampling.num_steps=6"),
    "actor_rollout_ref.rollout.n=2",
)
"""Overrides of a run of published size on a CPU."""
STEPS_ALONE = (
    *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"),
    *("trainer.resume_mode=disable", "trainer.logger=[]"),
)
"""Overrides of a run whose steps are all that is asked for: no validation, checkpoint or logger."""
NUM_LOG_LINES = 20
"""Lines of the log that are shown if a run fails."""


class RunFailed(RuntimeError):
    """A run ended with an error, or without its steps."""


@dataclass(frozen=True)
class CheckRun:
    """A run that a check makes."""

    num_steps: int
    num_cpu_steps: int
    recipe: str = "digen_quickstart"
    checkpoint: str | None = None
    """Key of `models.tiny.BUILDERS`, and of `TRUE_SIZES` for another recipe than the quick start's; None:
    the quick start's own, in a checkout."""
    overrides: tuple[str, ...] = ()
    rewards: tuple[float, ...] = ()
    """Rewards of the steps on a CPU, which are due on every device, as noise is the same."""

    @property
    def is_published(self) -> bool:
        """True if its checkpoint has the published size."""
        return self.recipe != "digen_quickstart"


RUNS = {
    "training": CheckRun(3, 3, checkpoint="qwen_image"),
    "quickstart": CheckRun(5, 1),
    "quickstart_fp32": CheckRun(3, 3, overrides=FP32, rewards=(0.5922, 0.5845, 0.5451)),
    "sd3": CheckRun(2, 1, "digen_sd3", "sd3", GROUPS_OF_16),
    "sd3_fast": CheckRun(2, 1, "digen_sd3+flowgrpo_fast", "sd3", GROUPS_OF_16),
    "sd3_nft": CheckRun(2, 1, "digen_sd3+nft", "sd3", GROUPS_OF_16),
    "qwen_image": CheckRun(
        *(2, 1, "digen_qwen_image", "qwen_image"), ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=8")
    ),
    "flux": CheckRun(2, 1, "digen_flux+flowgrpo_fast", "flux_dev", GROUPS_OF_16),
    "wan": CheckRun(2, 1, "digen_wan2_1", "wan2.1", ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=8")),
}
"""Check -> its run."""


def check_run(setting: Setting) -> str:
    """Make the run of the check that the setting's folder is named for. CheckFailed if it ended with an error, without
    its steps or a gradient, or with other rewards than are due."""
    run = RUNS[setting.folder.name]
    if run.checkpoint is None and not Path("examples/tiny_qwen_image/checkpoint").is_dir():
        raise CheckFailed("the quick start's checkpoint is not in this folder: start it in the checkout's folder")
    words, num_devices = _words(setting, run), quickstart_devices(setting.num_devices)
    devices = f"trainer.n_gpus_per_node={num_devices}", "++ray_kwargs.ray_init.include_dashboard=false"
    num_steps = run.num_cpu_steps if setting.is_cpu else run.num_steps
    run_dir = setting.folder / "run"
    planning = subprocess.Popen(plan_command(setting, run, words), stdout=subprocess.PIPE) if run.is_published else None
    try:
        steps = train(_recipe(run), (*devices, *words), num_steps, run_dir)
    except RunFailed as failed:
        raise CheckFailed(f"verl's main: {failed}") from failed
    finally:
        for number, step in enumerate(read_steps(run_dir), 1):
            setting.note(f"step {number}", **{key: step[key] for key in NOTED if key in step})
        if planning is not None:
            _note_plan(setting, planning.communicate()[0])
    return conclude(steps, num_devices, run.rewards)


def train(recipe: str, overrides: Sequence[str], num_steps: int, run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """Train in verl's main, in a process of its own, and return the metrics of its steps. `recipe`: names joined by
    "+", the algorithm's first; `run_dir`: a new folder. RunFailed if it ended with an error, or without its steps."""
    run_dir.mkdir(parents=True, exist_ok=False)
    log = run_dir / LOG
    with open(log, "w", encoding="utf-8") as file:
        command = command_of(recipe, overrides, num_steps, run_dir)
        exit_code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    steps = read_steps(run_dir)
    if exit_code == 0 and len(steps) == num_steps:
        return steps
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    stopped = [line.strip() for line in lines if "verl-digen: " in line or "Error" in line]
    raise RunFailed(
        f"exit code {exit_code}, {len(steps)} of {num_steps} steps were done; "
        + "\n".join([*stopped[-1:], f"the end of {log}:", *lines[-NUM_LOG_LINES:]])
    )


def command_of(recipe: str, overrides: Sequence[str], num_steps: int, run_dir: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", f"recipe={recipe}"),
        *(f"trainer.total_training_steps={num_steps}", *STEPS_ALONE, *overrides),
        *(f"trainer.default_local_dir={run_dir}", f"hydra.run.dir={run_dir}/hydra"),
    ]


def read_steps(run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """The metrics of a run's steps; empty if it did not get that far."""
    return tuple(row for row in read_lines(run_dir / METRICS) if "perf/step_s" in row)


def _words(setting: Setting, run: CheckRun) -> tuple[str, ...]:
    """The run's overrides, besides its devices'; writes the checkpoint and the prompts that they name."""
    if run.checkpoint is None:
        return run.overrides
    size, make = ("tiny", build_tiny) if setting.is_cpu or not run.is_published else ("published", write_checkpoint)
    checkpoint = make(run.checkpoint, setting.folder.parent / "checkpoints" / size / run.checkpoint)
    texts = [f"{'a red circle beside ' * (number % 5 + 1)}{number} squares" for number in range(16)]
    rows = [
        {"prompt": text, "data_source": "doctor", "reward_model": {"style": "rule", "ground_truth": text}}
        for text in texts
    ]
    prompts = setting.folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return (
        *(f"actor_rollout_ref.model.path={checkpoint}", f"data.train_files={prompts}", f"data.val_files={prompts}"),
        *("digen.reward.functions={jpeg_compressibility: 1.0}", "digen.report=false", *run.overrides),
        *(SMALL if run.is_published and setting.is_cpu else ()),
    )


def _recipe(run: CheckRun) -> str:
    """Recipes of the run; on a CPU that was asked for in spite of an accelerator, with the one that says so."""
    is_forced = get_platform().device_name == "cpu" and bool(accelerator_support())
    first, *parts = run.recipe.split("+")
    return "+".join([first, *(["digen_cpu"] if is_forced else []), *parts])


def plan_command(setting: Setting, run: CheckRun, words: Sequence[str]) -> list[str]:
    """Command line that plans the run on the devices that it takes; where there are none, on an H100."""
    program = "import sys; from verl_digen.cli import main; sys.exit(main())"
    devices = (f"gpus={quickstart_devices(setting.num_devices)}", *(("device=H100",) if setting.is_cpu else ()))
    plan = (sys.executable, "-W", "ignore", "-c", program, "plan", "--json")
    return [*plan, f"recipe={run.recipe}", *words, *devices]


def _note_plan(setting: Setting, text: bytes) -> None:
    """Note what `digen plan --json` calculated; what it refuses is in the check's log."""
    if text:
        plan = json.loads(text)
        phases = {f"{name}_gb": plan[name]["total_bytes"] / 1e9 for name in ("training", "generating", "decoding")}
        names = ("generating_s", "training_s", "step_s")
        times = {name: seconds for name in names if (seconds := plan["time"][name]) is not None}
        setting.note("planned (calculated)", **phases, host_gb=plan["host_needed_bytes"] / 1e9, **times)


def conclude(steps: Sequence[Mapping[str, float]], num_devices: int, rewards: Sequence[float] = ()) -> str:
    """Metrics of the steps -> figure. Raises CheckFailed: no step has a gradient, or rewards differ from `rewards`."""
    norms = [step["actor/grad_norm"] for step in steps]
    updates = [step["actor/grad_norm"] for step in steps if step["actor/num_skipped_updates"] == 0]  # fp16 may overflow
    if not updates or not all(math.isfinite(norm) and norm > 0 for norm in updates):
        raise CheckFailed(f"{len(steps)} steps with a gradient were due, got gradient norms {norms}")
    seconds = ", ".join(f"{step['perf/step_s']:.1f}" for step in steps)
    gaps = [step[GAP] for step in steps if GAP in step]
    compared = f"log-probs differ by {max(gaps):.0e}" if gaps else "the objective has no log-probs"
    figure = f"{len(steps)} steps on {num_devices} device(s) in {seconds} s; {compared}"
    if not rewards:
        return figure
    found = [step["reward/mean"] for step in steps]
    if max(abs(here - there) for here, there in zip(found, rewards, strict=True)) > REWARD_TOLERANCE:
        raise CheckFailed(f"rewards must be {_numbers(rewards)}, got {_numbers(found)}")
    return f"{figure}; rewards {_numbers(found)}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


@dataclass(frozen=True)
class TrueSize:
    """A checkpoint that can be made."""

    repository: str
    dtype: str
    """Dtype of the weights that are written, as a name of torch."""
    tokenizers: Sequence[str]
    """Functions of `models.tiny` that make its tokenizers, small ones that take any text, in the order of folders."""
    text_layers: int | None = None
    """Layers of the text encoder, if not all: what it takes of the host's memory is not the question then."""


CLIP, T5, QWEN = "parts:clip_tokenizer", "parts:t5_tokenizer", "qwen_image:tokenizer"
TRUE_SIZES = {
    "sd3": TrueSize("stabilityai/stable-diffusion-3.5-medium", "float16", (CLIP, CLIP, T5)),
    "qwen_image": TrueSize("Qwen/Qwen-Image", "bfloat16", (QWEN,), text_layers=1),
    "flux_dev": TrueSize("black-forest-labs/FLUX.1-dev", "bfloat16", (CLIP, T5), text_layers=1),
    "wan2.1": TrueSize("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "bfloat16", (T5,), text_layers=1),
}
"""Key of `models.tiny.BUILDERS` -> what is made in its place."""


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write checkpoint `name`, unless it is there."""
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(TRUE_SIZES[name], unfinished)
        unfinished.rename(folder)
    return folder


def _write(size: TrueSize, folder: Path) -> None:
    write_configs(size.repository, folder)
    index = json.loads((folder / "model_index.json").read_text())
    for number, maker in enumerate(size.tokenizers, 1):
        name, (module, function) = f"tokenizer_{number}" if number > 1 else "tokenizer", maker.split(":")
        tokenizer = getattr(importlib.import_module(f"verl_digen.models.tiny.{module}"), function)()
        tokenizer.save_pretrained(folder / name)
        index[name] = ["transformers", type(tokenizer).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    for file in sorted(folder.glob("*/config.json")):
        config = json.loads(file.read_text())
        if file.parent.name.startswith("text_encoder") and size.text_layers is not None:
            config = _with_layers(config, size.text_layers)
        file.write_text(json.dumps(config))
        if file.parent.name.startswith("transformer"):
            (file.parent / RANDOM_MARKER).write_text("drawn by verl_digen/models/checkpoint.py\n")
        else:
            _write_weights(file.parent, config, size.dtype)


def _with_layers(config: dict[str, Any], number: int) -> dict[str, Any]:
    """The config of a network with `number` layers of each kind."""
    config = {key: _with_layers(value, number) if isinstance(value, dict) else value for key, value in config.items()}
    for name in ("num_hidden_layers", "num_layers", "depth"):
        if name in config:
            config[name] = min(config[name], number)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:number]
    if "fullatt_block_indexes" in config:
        config["fullatt_block_indexes"] = [layer for layer in config["fullatt_block_indexes"] if layer < number] or [0]
    return config


def _write_weights(folder: Path, config: dict[str, Any], dtype_name: str) -> None:
    import diffusers
    import torch
    import transformers
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    with init_empty_weights(include_buffers=False):
        if "_class_name" in config:
            network, stem = getattr(diffusers, config["_class_name"]).from_config(config), "diffusion_pytorch_model"
        else:
            made = transformers.AutoConfig.for_model(**config)
            network, stem = getattr(transformers, config["architectures"][0])(made), "model"
    tied = set(getattr(network, "_tied_weights_keys", None) or ())
    dtype = getattr(torch, dtype_name)
    tensors = {
        name: draw_weight(name, tensor.shape, dtype) if tensor.is_meta else tensor
        for name, tensor in network.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})


QUICKSTART_PROMPTS = 8
"""Prompts of a step of recipe=digen_quickstart (`data.train_batch_size`)."""
MAX_CPU_RANKS = 2
"""Trainer ranks, and replicas, of the quick start on a CPU. Two of one thread train its rows faster than one of two
threads (docs/quickstart.md); each rank and each replica takes 1 GB."""


def quickstart_devices(found: int) -> int:
    """Devices that the quick start uses, all for both training and generation: of the `found` accelerators (0 counts as
    one device) as many as divide its prompts, because ranks share the rows of a step evenly.

    Example:
        [quickstart_devices(found) for found in (0, 1, 2, 3, 6, 8, 16)]  # [1, 1, 2, 2, 4, 8, 8]
    """
    fitting = [count for count in range(1, QUICKSTART_PROMPTS + 1) if QUICKSTART_PROMPTS % count == 0]
    return max(count for count in fitting if count <= max(found, 1))


def quickstart_override(found: int, num_cores: int) -> str:
    """Override of recipe=digen_quickstart for `found` accelerators; "" where it trains on one device.

    Example:
        quickstart_override(8, 64)  # "trainer.n_gpus_per_node=8"
        quickstart_override(0, 2)  # "trainer.n_gpus_per_node=2": two ranks of one thread
    """
    devices = quickstart_devices(found) if found else min(num_cores, MAX_CPU_RANKS)
    return f"trainer.n_gpus_per_node={devices}" if devices > 1 else ""


def main() -> None:
    platform = get_platform()
    found = 0 if platform.device_name == "cpu" or not platform.is_available() else platform.device_count()
    print(quickstart_override(found, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
    main()
