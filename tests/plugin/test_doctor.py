# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from verl_digen.cli import main
from verl_digen.tools.checkup import machine
from verl_digen.tools.checkup.machine import Problem, Report, to_text


def test_doctor_finds_everything_in_place_here(capsys):
    exit_code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert exit_code == 0
    assert report["plugin_loaded"]
    assert {"verl", "torch", "ray", "diffusers", "TransferQueue"} <= set(report["versions"])
    assert report["devices"]


@pytest.mark.parametrize(("found", "is_tested"), [(("0.30.0", "0.30.0"), True), (("0.30.0", "0.28.0"), False)])
def test_doctor_names_versions_of_vllm_and_vllm_omni_that_were_not_tested_together(found, is_tested):
    machine._check_vllm_omni(report := Report(versions=dict(zip(("vllm", "vllm-omni"), found, strict=True))))
    said = [one.what for one in report.problems if "were tested as 0.28.0 or 0.30.0" in one.what]
    assert len(said) == (not is_tested)


def test_doctor_names_once_what_keeps_verl_from_being_imported(monkeypatch):
    def broken(module):
        raise ModuleNotFoundError(f"Could not import a class of {module}") from RuntimeError(
            "torchvision::nms is missing"
        )

    monkeypatch.setattr(machine.importlib, "import_module", broken)
    machine._check_plugin(report := Report())
    (problem,) = report.problems
    assert problem.what == "verl cannot be imported (RuntimeError: torchvision::nms is missing)"


def test_text_ends_with_problems_and_their_remedies():
    report = Report(problems=[Problem("diffusers is not installed", "pip install 'diffusers==0.40.*'")])
    assert to_text(report).endswith("PROBLEM  diffusers is not installed\n  remedy pip install 'diffusers==0.40.*'")
    assert to_text(Report()).endswith("A run could start.")


def test_without_a_subcommand_the_help_lists_them(capsys):
    with pytest.raises(SystemExit):
        main([])
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out
