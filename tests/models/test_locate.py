# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import huggingface_hub.constants
import pytest

from verl_digen.models.locate import locate, locate_index

COMMIT = "0" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache that holds the repository acme/tiny, and no network."""
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    (snapshot / "transformer").mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (snapshot / "transformer" / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_repository_of_the_hub_is_found_in_its_cache(hub_cache):
    assert locate("acme/tiny") == hub_cache
    assert locate_index("acme/tiny") == hub_cache


def test_a_folder_wins_over_a_repository_of_the_same_name(hub_cache, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert locate("acme/tiny") == Path("acme/tiny")


def test_a_name_that_is_neither_is_an_error_with_the_remedy(hub_cache):
    with pytest.raises(ValueError, match=r"model\.path must be .* got 'acme/absent'.*HF_TOKEN"):
        locate("acme/absent")
