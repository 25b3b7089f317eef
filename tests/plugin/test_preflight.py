# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.plugin.conftest import start_main
from tests.tiny_models import build_tiny
from verl_digen import plugin, preflight
from verl_digen.data.dataset import DiffusionPromptDataset
from verl_digen.plan.published import checkpoint_folder
from verl_digen.preflight.model import check_model
from verl_digen.preflight.notes import notes
from verl_digen.preflight.verl_keys import check_digen
from verl_digen.trainer.validation import allow_no_prompts

MODEL_RECIPES = (
    *("digen_flux", "digen_hunyuan_video", "digen_hunyuan_video15", "digen_qwen_image", "digen_sd3", "digen_wan2_1"),
    *("digen_wan2_2", "digen_z_image", "[digen_sd3,flowgrpo_fast]", "[digen_flux,flowgrpo_fast]"),
    *("[digen_sd3,diffusion_nft]", "[digen_wan2_1,diffusion_nft]"),
)


def problem(compose_main, *overrides):
    """The message `check` raises for these overrides."""
    with pytest.raises(ValueError) as raised:
        preflight.check(compose_main(*overrides))
    return str(raised.value)


def test_a_good_config_passes(compose_main, runnable):
    preflight.check(compose_main(*runnable))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("digen.sampling.num_steps=1", "digen.sampling.num_steps must be >= 2, got 1;"),
        ("+digen.nonsense=1", "Key 'nonsense' not in 'DigenConfig'"),
        ("actor_rollout_ref.model.path=no_such_folder", "actor_rollout_ref.model.path must be"),
        ("digen.sampling.height_px=33", "digen.sampling.height_px"),
        ("data.train_files=null", "data.train_files must name a file of prompts, got nothing;"),
        ("data.train_files=missing.txt", "data.train_files must name an existing file, got 'missing.txt';"),
        ("data.train_batch_size=64", "data.train_files must hold data.train_batch_size=64 prompts or more, got 8;"),
        (
            "data.train_max_samples=3",
            "prompts or more (data.train_max_samples=3 of 8), got 3; raise data.train_max_samples, or lower",
        ),
        ("data.val_max_samples=0", "data.val_max_samples must be -1, which takes all prompts, or a number"),
        ("data.train_files=5", "data.train_files must name a prompt file or a list of them, got 5;"),
        ("data.val_files={a: 1}", "data.val_files must name a prompt file or a list of them, got {'a': 1};"),
        ("trainer.n_gpus_per_node=3", "data.train_batch_size x actor_rollout_ref.rollout.n must be a multiple of"),
        ("trainer.n_gpus_per_node=16", "ray_kwargs.ray_init.num_gpus must be >= 16"),
        ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n must be >= 2"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", "ppo_mini_batch_size must divide data.train_batch_size=4"),
        ("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.strategy must be fsdp2"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name must be one of diffusers"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "tensor_model_parallel_size (times"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "digen.kl.coef is the weight of the KL term"),
        ("digen.tag.policy=bts", "digen.tag.policy must be off where trainer and replicas take turns"),
        ("digen.staleness.max_versions=1", "digen.staleness.max_versions must be 0 where trainer and replicas"),
        ("digen.tag.policy=on", "digen.tag.policy must be one of off, bts, always, got 'on';"),
        ("digen.staleness.fraction=0", "digen.staleness.fraction must lie in (0, 1], got 0.0;"),
        ("digen.loss.name=ppo", "digen.loss.name must be one of cispo, dance_grpo, "),
        ("digen.loss.clip_range=2", "digen.loss.clip_range must lie in (0, 1), got 2.0;"),
        ("digen.loss.clip_rnage=1e-4", "digen.loss.clip_rnage must be a setting of digen.loss.name=flow_grpo, got"),
        ("digen.loss.clip_range=wide", "digen.loss.clip_range: Value 'wide' of type 'str' could not be converted"),
        ("digen.loss.tau=0.2", "digen.loss.tau must be a setting of digen.loss.name=flow_grpo, got 0.2, a setting of"),
        (
            "digen.placement.generator_accelerator=H100",
            "generator_accelerator needs replicas on devices",
        ),
        ("digen.reward.functions.nonsense=1.0", "digen.reward.functions must name one of jpeg_compressibility"),
        ("reward.custom_reward_function.path=missing.py", "reward.custom_reward_function.path must be an existing"),
    ],
)
def test_a_bad_value_is_named_by_its_key(compose_main, runnable, override, message):
    from verl.plugin.platform import get_platform

    if "num_gpus" in message and get_platform().device_name != "cpu":
        pytest.skip("a rule for machines without an accelerator")
    assert message in problem(compose_main, *runnable, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("digen.tag.policy=bts", "digen.staleness.max_versions=1"), None),
        (("digen.loss.name=tis", "digen.staleness.max_versions=3"), None),
        (
            ("digen.staleness.max_versions=2",),
            "digen.loss.name must be one of cispo, decoupled_ppo, gspo, kimi, reinforce, tis, topr, weighted_topr with "
            "digen.staleness.max_versions=2, got 'flow_grpo'",
        ),
        (
            ("digen.staleness.max_versions=1", "digen.loss.old_log_probs=recompute"),
            "digen.loss.old_log_probs must be auto or rollout with digen.loss.name=flow_grpo and "
            "digen.staleness.max_versions=1",
        ),
        (("actor_rollout_ref.actor.ppo_epochs=2",), "ppo_epochs 1 on separate pools, where a batch is one optimizer"),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=2",), "ppo_mini_batch_size must be data.train_batch_size=4"),
        (
            ("digen.staleness.max_versions=1", "digen.ema.enable=true", "digen.ema.validate=true"),
            "digen.ema.validate must be false with digen.staleness.max_versions > 0",
        ),
    ],
)
def test_what_separate_pools_can_do_and_what_not(compose_main, runnable, overrides, message):
    separate = ["recipe=[digen_flowgrpo,disaggregated]", *runnable[1:], *overrides]
    if message is None:
        preflight.check(compose_main(*separate))
    else:
        assert message in problem(compose_main, *separate)


@pytest.fixture
def tiny_video(tmp_path):
    """A tiny Wan2.2 A14B, which a test may damage."""
    return build_tiny("wan2.2_a14b", tmp_path / "video")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("digen.sampling.num_frames=80", "digen.sampling.num_frames must be 1 plus a multiple of 4 for this Wan"),
        (
            "digen.sampling.width_px=40",
            "digen.sampling.width_px must be a multiple of 16 for this Wan checkpoint, got 40",
        ),
        (
            "digen.sampling.guidance_scale=3.5",
            "digen.sampling.guidance_scale must be null for this Wan",
        ),
    ],
)
def test_a_video_that_the_model_cannot_make_is_refused(compose_main, runnable, tiny_video, override, message):
    assert message in problem(compose_main, *runnable, f"actor_rollout_ref.model.path={tiny_video}", override)


def test_a_checkpoint_without_one_of_its_parts_is_refused_before_anything_starts(compose_main, runnable, tiny_video):
    shutil.rmtree(tiny_video / "transformer_2")
    found = problem(compose_main, *runnable, f"actor_rollout_ref.model.path={tiny_video}")
    assert "must hold all parts of its WanPipeline" in found and "lacks transformer_2; complete the download" in found


def test_a_prompt_that_is_longer_than_the_model_reads_is_refused(compose_main, runnable, tiny_video, tmp_path):
    (tmp_path / "long.txt").write_text("\n".join(["red " * 500, *["a red circle"] * 3, "red " * 600]))
    overrides = [f"actor_rollout_ref.model.path={tiny_video}", f"data.train_files={tmp_path / 'long.txt'}"]
    found = problem(compose_main, *runnable, *overrides)
    place = f"line 5 of '{tmp_path / 'long.txt'}'"
    assert found.startswith(f"{place}: a prompt must have at most 512 tokens for Wan, got 601 for 'red red "), found
    assert "shorten it in data.train_files or data.val_files, or set data.filter_overlong_prompts=true" in found
    filtered = compose_main(*runnable, *overrides, "data.filter_overlong_prompts=true")
    preflight.check(filtered)
    assert any(f"1 of 5 prompts of data.train_files are left out, the first in {place}" in n for n in notes(filtered))
    kept = DiffusionPromptDataset(filtered.data.train_files, config=filtered.data)
    assert len(kept) == 4 and kept[3]["row"].text == "a red circle"


@pytest.mark.parametrize(
    ("checkpoint", "pipeline"),
    [
        ("flux_dev", "FluxKontextPipeline"),
        ("qwen_image", "QwenImageEditPipeline"),
        ("qwen_image", "QwenImageEditPlusPipeline"),
        ("wan2.1", "WanImageToVideoPipeline"),
        ("wan2.1", "LTXPipeline"),
    ],
)
def test_a_pipeline_that_is_not_supported_is_refused_before_anything_starts_whatever_its_transformer(
    compose_main, runnable, tmp_path, checkpoint, pipeline
):
    """All but the last have the transformer of the pipeline that the checkpoint was made for."""
    path = build_tiny(checkpoint, tmp_path / "checkpoint")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"_class_name": pipeline}))
    found = problem(compose_main, *runnable, f"actor_rollout_ref.model.path={path}")
    assert found.startswith("actor_rollout_ref.model.path must hold a checkpoint of one of FluxPipeline, "), found
    assert f"got a {pipeline}, which is not supported" in found
    assert len(found.splitlines()) == 1


def test_a_network_that_is_not_the_pipelines_is_refused(compose_main, runnable, tiny_video):
    index = json.loads((tiny_video / "model_index.json").read_text())
    other = {"transformer": ["diffusers", "LTXVideoTransformer3DModel"]}
    (tiny_video / "model_index.json").write_text(json.dumps(index | other))
    found = problem(compose_main, *runnable, f"actor_rollout_ref.model.path={tiny_video}")
    assert "must hold a WanTransformer3DModel for Wan, got LTXVideoTransformer3DModel" in found


def test_a_checkpoint_that_vllm_omni_does_not_serve_is_refused_before_anything_starts(compose_main, runnable, tmp_path):
    path = build_tiny("hunyuan_video", tmp_path / "hunyuan")
    overrides = [f"actor_rollout_ref.model.path={path}", "digen.sampling.num_frames=5"]
    preflight.check(compose_main(*runnable, *overrides))
    found = problem(compose_main, *runnable, *overrides, "actor_rollout_ref.rollout.name=vllm_omni")
    assert "name=vllm_omni needs a checkpoint of one of FluxPipeline, " in found
    assert "got 'HunyuanVideoPipeline'; set actor_rollout_ref.rollout.name=diffusers" in found


def test_an_adapter_that_vllm_omni_cannot_bind_is_refused_before_anything_starts(compose_main, runnable, tmp_path):
    path = build_tiny("hunyuan_video15", tmp_path / "hunyuan15")
    served = [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.name=vllm_omni"]
    check_model(compose_main(*runnable, *served))
    for rank in ("actor_rollout_ref.model.lora_rank=4", "+actor_rollout_ref.model.lora.rank=4"):
        served_adapter = [*served, rank]
        found = problem(compose_main, *runnable, *served_adapter)
        assert "actor_rollout_ref.model.exclude_modules must leave out refiner_blocks for an adapter" in found
        assert "got None; set it to '.*refiner_blocks.*', or actor_rollout_ref.model.lora.merge=true" in found
        for remedy in ("exclude_modules='.*refiner_blocks.*'", "lora.merge=true", "target_modules=[attn.add_q_proj]"):
            check_model(compose_main(*runnable, *served_adapter, f"actor_rollout_ref.model.{remedy}"))


def test_a_pipeline_without_a_transformer_is_refused(compose_main, runnable, tiny_video):
    index = json.loads((tiny_video / "model_index.json").read_text())
    (tiny_video / "model_index.json").write_text(json.dumps(index | {"transformer": None}))
    found = problem(compose_main, *runnable, f"actor_rollout_ref.model.path={tiny_video}")
    assert "must hold all parts of its WanPipeline" in found and "lacks transformer; complete the download" in found


@pytest.mark.parametrize("recipe", MODEL_RECIPES)
def test_the_published_checkpoint_of_a_recipe_makes_what_the_recipe_asks_for(compose_main, recipe):
    """From the configs that `digen plan` has, so without a download."""
    config = compose_main(f"recipe={recipe}")
    with checkpoint_folder(config.actor_rollout_ref.model.path) as folder:
        config.actor_rollout_ref.model.path = str(folder)
        check_model(config)
        check_digen(config)


def test_a_run_without_a_reward_is_refused(compose_main, runnable):
    assert "digen.reward.functions must name" in problem(compose_main, *runnable[:-1])


def test_verls_loaders_are_made_where_a_run_does_not_validate_and_names_no_prompts_for_it(compose_main, runnable):
    never = "data.val_files=null", "trainer.test_freq=-1", "trainer.val_before_train=false"
    config = compose_main(*runnable, *never, "data.validation_shuffle=true")
    preflight.check(config)
    allow_no_prompts(config)
    trainer: Any = SimpleNamespace(
        config=config, trainer_mode="sync", tokenizer=None, processor=None, parameter_sync_step=1
    )
    PPOTrainer._init_dataloader(trainer)
    assert len(trainer.train_dataset) == 8 and list(trainer.val_dataloader) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def compute_score(**kwargs):\n    return 0.0\n", None),
        (
            "import a_package_that_is_not_there\n",
            "got ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
        ),
        ("def compute_scores(**kwargs): ...\n", "got AttributeError: Object not found in module: .*compute_score"),
        ("def compute_score(:\n", "got SyntaxError: invalid syntax"),
    ],
)
def test_a_reward_file_that_workers_could_not_load_is_told_before_they_start(
    compose_main, runnable, tmp_path, text, found
):
    path = tmp_path / "reward.py"
    path.write_text(text)
    overrides = (*runnable, f"reward.custom_reward_function.path={path}")
    if found is None:
        preflight.check(compose_main(*overrides))
    else:
        message = problem(compose_main, *overrides)
        assert message.startswith(f"reward.custom_reward_function.path={path} must be a module that can be imported")
        assert re.search(found, message) and message.endswith("repair the file, or install what it imports")


def test_log_probs_that_the_loss_does_not_read_are_refused(compose_main, runnable):
    message = problem(compose_main, *runnable, "digen.loss.name=tis", "digen.loss.old_log_probs=recompute")
    assert message.startswith("digen.loss.old_log_probs must be auto with digen.loss.name=tis")
    preflight.check(compose_main(*runnable, "digen.loss.name=gspo"))


def test_all_problems_are_shown_at_once(compose_main, runnable):
    message = problem(compose_main, *runnable, "digen.loss.name=ppo", "actor_rollout_ref.rollout.n=1")
    assert len(message.splitlines()) == 2


def test_a_plugin_that_failed_refuses_the_run_and_names_the_cause(compose_main, runnable):
    plugin.FAILURES.append("its engine could not be registered (ImportError: diffusers)")
    try:
        assert "its engine could not be registered (ImportError: diffusers)" in problem(compose_main, *runnable)
    finally:
        plugin.FAILURES.pop()


def test_recipes_install_the_callback_and_it_stops_hydra(compose_main, capsys):
    config = compose_main("recipe=digen_flowgrpo", "digen.loss.name=ppo")
    with pytest.raises(SystemExit) as stopped:
        Callbacks(config).on_run_start(config=config, config_name="ppo_trainer")
    assert stopped.value.code == 2
    assert "digen.loss.name must be one of" in capsys.readouterr().err


def test_verl_alone_has_no_callback(compose_main):
    assert not OmegaConf.select(compose_main(), "hydra.callbacks")


def test_main_shows_a_paragraph_and_writes_nothing(tmp_path):
    refused = start_main("recipe=digen_flowgrpo", cwd=tmp_path)
    shown = start_main("recipe=digen_flowgrpo", "--cfg", "job", cwd=tmp_path)
    _, stderr = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "verl-digen: this config cannot run.\n" in stderr
    assert "actor_rollout_ref.model.path must be" in stderr
    assert "Traceback" not in stderr
    stdout, _ = shown.communicate(timeout=120)
    assert shown.returncode == 0 and "digen:\n" in stdout
    assert list(tmp_path.iterdir()) == []
