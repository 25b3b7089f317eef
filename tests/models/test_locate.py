# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from verl_digen.models.locate import locate, locate_configs, locate_index

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
    assert locate_index("acme/tiny") == locate_configs("acme/tiny") == hub_cache


def test_only_what_the_index_names_is_downloaded(hub_cache, monkeypatch):
    """FLUX.1's repository has its 24 GB a second time in one file, SD3.5's its encoders in fp16."""
    index = {"_class_name": "P", "transformer": ["diffusers", "T"], "image_encoder": [None, None], "boundary": 0.5}
    (hub_cache / "model_index.json").write_text(json.dumps(index))
    published = [
        *("model_index.json", "flux1-dev.safetensors", "image_encoder/model.safetensors", "transformer/notes.md"),
        *("transformer/config.json", "transformer/model.safetensors", "transformer/model.fp16.safetensors"),
    ]
    asked = []

    def snapshot(repository, *, allow_patterns, ignore_patterns):
        filters = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        asked.append(list(huggingface_hub.utils.filter_repo_objects(published, **filters)))
        return str(hub_cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    locate("acme/tiny")
    locate_configs("acme/tiny")
    with_weights = ["model_index.json", "transformer/config.json", "transformer/model.safetensors"]
    assert asked == [with_weights, ["model_index.json", "transformer/config.json"]]


def test_a_folder_wins_over_a_repository_of_the_same_name(hub_cache, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert locate("acme/tiny") == Path("acme/tiny")


def test_a_name_that_is_neither_is_an_error_with_the_remedy(hub_cache):
    with pytest.raises(ValueError, match=r"model\.path must be .* got 'acme/absent'.*HF_TOKEN"):
        locate("acme/absent")
