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
