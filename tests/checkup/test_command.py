# SPDX-License-Identifier: Apache-2.0
"""`digen doctor --gpu --device cpu` as a user types it: a process per check, Ray, verl's main."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import build_tiny
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.tools.checkup import training
from verl_digen.tools.checkup.checks import CHECKS
from verl_digen.tools.checkup.training import RUNS, SMALL, TRUE_SIZES
from verl_digen.tools.plan.compose import Words
from verl_digen.tools.plan.output import check_words

ROOT = Path(__file__).resolve().parents[2]
H100 = Words(gpus=1, device="H100")


def doctor(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Run the command in the checkout's folder -> outcomes by check; all passed."""
    command = [sys.executable, "-W", "ignore", "-c", "import verl_digen.cli as cli; raise SystemExit(cli.main())"]
    done = subprocess.run(
        [*command, "doctor", "--gpu", "--device", "cpu", "--json", str(folder / "doctor.json"), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads((folder / "doctor.json").read_text())["checks"]}


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.grid
def test_every_check_passes_here(tmp_path: Path):
    outcomes = doctor(tmp_path, "--full")
    assert list(outcomes) == list(CHECKS)
    assert outcomes["training"]["figure"].startswith("3 steps on 1 device(s) in ")
    assert "GB/s" in outcomes["update"]["figure"]


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.grid
def test_what_only_full_runs_passes_here(tmp_path: Path):
    """Stable Diffusion 3.5 through verl's main, tiny in place of its published size; others differ by their recipe."""
    names = ("rates", "architectures", "quickstart_fp32", "sd3_fast")
    outcomes = doctor(tmp_path, "--out", str(tmp_path), *(word for name in names for word in ("--only", name)))
    assert outcomes["quickstart_fp32"]["figure"].endswith("rewards 0.5922, 0.5845, 0.5451")
    step, planned = outcomes["sd3_fast"]["measured"]
    assert step["what"] == "step 1" and step["rollout/log_prob_gap_max"] < 1e-5
    assert planned["training_gb"] > 0 and planned["training_s"] > 0
    noted = [json.loads(line)["check"] for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(noted)) == list(names)
    assert "All checks passed" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("name", TRUE_SIZES)
def test_a_checkpoint_of_published_size_has_the_configs_and_every_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Tiny configs in place of the published ones; encoders and VAE are written, the transformer is drawn."""
    tiny = build_tiny(name, tmp_path / "tiny")
    monkeypatch.setattr(training, "write_configs", lambda repository, folder: _copy_configs(tiny, folder))
    folder = training.write_checkpoint(name, tmp_path / "made")
    assert not list(folder.glob("transformer/*.safetensors")) and training.write_checkpoint(name, folder) == folder
    model = load_model(folder)
    (condition,) = model.load_encoder(torch.float16, torch.device("cpu"))([PromptInputs("a red circle")])
    assert condition["embeds"].isfinite().all() and condition["embeds"].std() > 0
    network = model.load_transformer(torch.float32)
    assert sum(p.numel() for p in network.parameters()) == sum(
        p.numel() for p in load_model(tiny).load_transformer(torch.float32).parameters()
    )
    model.load_decoder(torch.float32, torch.device("cpu"))


def _copy_configs(source: Path, folder: Path) -> None:
    for file in source.rglob("*.json"):
        if "tokenizer" not in file.parent.name:
            (folder / file.parent.relative_to(source)).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.relative_to(source))


@pytest.mark.parametrize("size", [(), SMALL], ids=["accelerator", "cpu"])
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.is_published])
def test_the_words_of_a_run_of_published_size_are_taken(name: str, size: tuple[str, ...]):
    run = RUNS[name]
    assert run.checkpoint is not None
    own = (f"actor_rollout_ref.model.path={TRUE_SIZES[run.checkpoint].repository}", *run.overrides, *size)
    config = check_words([f"recipe=[{run.recipe}]", *own], H100)
    assert config.actor_rollout_ref.rollout.n in (2, 8, 16) and config.actor_rollout_ref.model.lora_rank == 32


def test_every_check_that_trains_has_its_run():
    assert list(RUNS) == [name for name, check in CHECKS.items() if check.function == "training:check_run"]
