# SPDX-License-Identifier: Apache-2.0
"""Versions that are refused and warned of."""

import logging
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet

from verl_digen.hardware.versions import SUPPORTED
from verl_digen.preflight import RULES
from verl_digen.preflight.machine import check_versions
from verl_digen.preflight.start_config import StartConfig

NO_CONFIG = OmegaConf.create({})


def test_what_is_installed_here_is_what_was_tested(caplog):
    check_versions(StartConfig(NO_CONFIG))
    assert not caplog.records and check_versions in RULES


@pytest.mark.parametrize(("name", "number"), [("torch", "2.16.0"), ("torch", "2.10.1+cu128"), ("verl", "0.10.0")])
def test_a_version_that_cannot_work_is_refused_with_the_one_that_was_tested(name, number):
    with pytest.raises(ValueError, match=rf"^{name} must be .*got {number.replace('+', '.')}; .*tested with =="):
        check_versions(StartConfig(NO_CONFIG), lambda package: number if package == name else version(package))


@pytest.mark.parametrize(("name", "number"), [("torch", "2.12.1+cu130"), ("peft", "0.20.0"), ("ray", "2.50.0")])
def test_a_version_that_was_not_tested_is_warned_of_by_name(name, number, caplog):
    with caplog.at_level(logging.WARNING):
        check_versions(StartConfig(NO_CONFIG), lambda package: number if package == name else version(package))
    assert len(caplog.records) == 1 and f"{name} {number} was not tested" in caplog.text


@pytest.mark.parametrize(("name", "number"), [("torch", "2.11.0+cpu"), ("torch", "2.12.0"), ("transformers", "5.9.0")])
def test_each_version_that_was_tested_passes_without_a_word(name, number, caplog):
    check_versions(StartConfig(NO_CONFIG), lambda package: number if package == name else version(package))
    assert not caplog.records


@pytest.mark.parametrize(("name", "specifiers"), [("torch", ">=2.11,<2.16"), ("transformers", ">=5.9,<5.25")])
def test_the_package_requires_the_range_that_can_work(name, specifiers):
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    assert f'"{name}{specifiers}",' in setup
    assert SUPPORTED[name].can_work == SpecifierSet(specifiers)
