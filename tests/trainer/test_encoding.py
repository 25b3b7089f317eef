# SPDX-License-Identifier: Apache-2.0
"""Prompts encoded before a run, by processes of a real Ray."""

from types import SimpleNamespace

import pytest
import torch

from verl_digen.config import digen_config
from verl_digen.models import load_model
from verl_digen.rollout.stored import StoredConditions
from verl_digen.tools.plan.compose import Words, compose_run
from verl_digen.trainer.encoding import CHUNK, encode_before, prompts_of
from verl_digen.types import PromptRow


def composed(checkpoint, folder, **rollout):
    words = {"encoders": "before", "conditions_dir": folder, **rollout}
    return compose_run(
        [
            "recipe=digen_quickstart+digen_cpu",
            f"actor_rollout_ref.model.path={checkpoint}",
            "digen.sampling.true_cfg_scale=3",
            *(f"digen.rollout.{name}={value}" for name, value in words.items()),
        ],
        Words(),
    )


def datasets(*texts):
    return [SimpleNamespace(prompts=[PromptRow(text, "", None) for text in texts]), SimpleNamespace(prompts=[])]


@pytest.mark.usefixtures("ray_cluster")
def test_what_the_folder_lacks_is_encoded_and_nothing_else(tiny_qwen_image, tmp_path, capfd, caplog):
    config = composed(tiny_qwen_image, tmp_path)
    texts = [f"{number} cats" for number in range(CHUNK + 2)]
    model = load_model(tiny_qwen_image)
    stored = StoredConditions(str(tmp_path), model, torch.float32)
    given = datasets(*texts, "a cat " * 2000)
    digen = digen_config(config)
    prompts = prompts_of(digen, given[0].prompts)
    assert len(prompts) == len(texts) + 2, "each prompt, and the negative one once"
    encode_before(config, digen, given)
    encode = model.load_encoder(torch.float32, torch.device("cpu"))
    paths = {prompt: stored.path(prompt) for prompt in prompts if len(prompt.text) < 100}
    for prompt in paths:
        (expected,), (found,) = encode([prompt]), stored.encoder()([prompt])
        assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert "a prompt cannot be encoded, and its samples will fail" in caplog.text
    assert f"{len(prompts)}/{len(prompts)}" in capfd.readouterr().err, "progress"
    lost = [*paths.values()][3:7]  # as of a run that was killed
    before = {path: path.stat().st_ino for path in paths.values() if path not in lost}
    for path in lost:
        path.unlink()
    encode_before(config, digen, datasets(*texts))
    assert all(path.is_file() for path in lost) and before == {path: path.stat().st_ino for path in before}
    with pytest.raises(ValueError, match=r"digen.rollout.conditions_gb must hold the conditions of all 40 prompts"):
        config = composed(tiny_qwen_image, tmp_path, conditions_gb=1e-5)
        encode_before(config, digen_config(config), datasets(*map(str, range(39))))
