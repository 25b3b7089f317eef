# SPDX-License-Identifier: Apache-2.0
import json
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf, open_dict
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.grid import in_grid
from tests.models.cases import changed, draw_image
from tests.plugin.conftest import start_main
from tests.tiny_models import build_tiny
from verl_digen import plugin, preflight
from verl_digen.config import digen_config
from verl_digen.models.published import checkpoint_folder
from verl_digen.preflight.inputs import check_prompts
from verl_digen.preflight.kernels import check_precision
from verl_digen.preflight.machine import check_address, check_cpus, require_devices, reserved_cpus
from verl_digen.preflight.model import check_model
from verl_digen.preflight.pools import check_device
from verl_digen.preflight.rules import check_plannable, notes
from verl_digen.preflight.start_config import StartConfig
from verl_digen.preflight.unread import effect_problems
from verl_digen.preflight.values import unused_problems, value_problems
from verl_digen.preflight.verl_keys import check_digen
from verl_digen.processes.cluster import joins_cluster
from verl_digen.tools.checkup.training import quickstart_override
from verl_digen.trainer.dataset import DiffusionPromptDataset
from verl_digen.trainer.validation import allow_no_prompts, take_all_steps

pytestmark = pytest.mark.slow

MODEL_RECIPES = (
    *("digen_flux", "digen_hunyuan_video", "digen_hunyuan_video15", "digen_qwen_image", "digen_sd3", "digen_wan2_1"),
    *("digen_qwen_image_edit", "digen_flux_kontext", "digen_flux2_klein"),
    *("digen_wan2_1_i2v", "digen_wan2_2_i2v", "digen_wan2_2_ti2v", "digen_hunyuan_video15_i2v"),
    "digen_ltx2",
    *("digen_wan2_2", "digen_z_image", "[digen_sd3,nft]", "[digen_flux,mixgrpo]", "[digen_sd3,branch]"),
)
"""A recipe per model, and one of each kind of points."""
MORE_RECIPES = (
    *("[digen_sd3,flowgrpo_fast]", "[digen_flux,flowgrpo_fast]", "[digen_wan2_1,nft]", "[digen_wan2_1,mixgrpo]"),
    *("[digen_sd3,awm]", "[digen_hunyuan_video,dgpo]", "[digen_qwen_image,dpo]"),
    *("[digen_wan2_1,longcat]", "[digen_sd3,longcat]", "[digen_sd3,guard]", "[digen_sd3,dppo]", "[digen_sd3,gdpo]"),
    *("[digen_wan2_1,branch]", "[digen_sd3,distilled]", "[digen_flux2_klein,distilled]"),
)


def problem(start, *overrides):
    """The message `check` raises for these overrides."""
    with pytest.raises(ValueError) as raised:
        preflight.check(start(*overrides))
    return str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("digen.tag.policy=bts", "digen.staleness.max_versions=1"), None),
        (("digen.loss.name=tis", "digen.staleness.max_versions=3"), None),
        (
            ("digen.staleness.max_versions=2",),
            "digen.loss.name must be one of awm, awm_off_policy, cispo, decoupled_ppo, dgpo, diffusion_nft, gspo, "
            "kimi, offline_dpo, online_dpo, reinforce, tis, topr, weighted_topr with "
            "digen.staleness.max_versions=2, got 'flow_grpo'",
        ),
        (
            ("digen.staleness.max_versions=1", "digen.loss.old_log_probs=recompute"),
            "digen.loss.old_log_probs must be auto or rollout with digen.loss.name=flow_grpo and "
            "digen.staleness.max_versions=1",
        ),
        (("actor_rollout_ref.actor.ppo_epochs=2",), "a batch is one optimizer step, got (4, 2); set them so"),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=2",), "ppo_mini_batch_size must be data.train_batch_size=4"),
        (("digen.ema.validate=true",), "digen.ema.enable must be true with digen.ema.validate=true, got False"),
        (
            ("digen.staleness.max_versions=1", "digen.ema.enable=true", "digen.ema.validate=true"),
            "digen.ema.validate must be false with digen.staleness.max_versions > 0",
        ),
        (
            ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",),
            "got 'nccl'; nccl is verl's and needs cupy: install cupy-cuda12x (or -cuda13x), or choose digen_gloo",
        ),
        (
            ("actor_rollout_ref.rollout.checkpoint_engine.backend=nixl",),
            "must be one of digen_gloo, whose packages are installed, got 'nixl'; install what "
            "verl/checkpoint_engine/ imports for nixl, or choose digen_gloo",
        ),
        (("actor_rollout_ref.rollout.checkpoint_engine.backend=digen_glo",), "did you mean digen_gloo?"),
    ],
)
def test_what_separate_pools_can_do_and_what_not(start, runnable, overrides, message):
    separate = ["recipe=digen_flowgrpo+disaggregated", *runnable[1:], *overrides]
    if message is None:
        preflight.check(start(*separate))
    else:
        assert message in problem(start, *separate)


def test_an_engine_that_sends_differences_of_weights_is_refused(start, runnable, monkeypatch):
    engine = type("Delta", (), {"wire_format": "delta_flush"})
    monkeypatch.setitem(CheckpointEngineRegistry._registry, "delta_sharded", engine)
    backend = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    with pytest.raises(ValueError, match=f"{backend} must be one of digen_gloo, .*, got 'delta_sharded'; choose one"):
        preflight.check(start("recipe=digen_flowgrpo+disaggregated", *runnable[1:], f"{backend}=delta_sharded"))


@pytest.fixture
def tiny_video(tmp_path):
    """A tiny Wan2.2 A14B, which a test may damage."""
    return build_tiny("wan2.2_a14b", tmp_path / "video")


def test_a_checkpoint_without_one_of_its_parts_is_refused_before_anything_starts(start, runnable, tiny_video):
    shutil.rmtree(tiny_video / "transformer_2")
    index = json.loads((tiny_video / "model_index.json").read_text())
    for changes, lacking in (({}, "transformer_2"), ({"transformer": None}, "transformer, transformer_2")):
        (tiny_video / "model_index.json").write_text(json.dumps(index | changes))
        found = problem(start, *runnable, f"actor_rollout_ref.model.path={tiny_video}")
        assert "all parts of its WanPipeline" in found and f"lacks {lacking}; complete the download" in found


def test_a_prompt_that_is_longer_than_the_model_reads_is_refused(start, runnable, tiny_video, tmp_path):
    (tmp_path / "long.txt").write_text("\n".join(["red " * 500, *["a red circle"] * 3, "red " * 600]))
    overrides = [f"actor_rollout_ref.model.path={tiny_video}", f"data.train_files={tmp_path / 'long.txt'}"]
    found = problem(start, *runnable, *overrides)
    place = f"line 5 of '{tmp_path / 'long.txt'}'"
    assert found.startswith(f"{place}: a prompt must have at most 512 tokens for Wan, got 601 for 'red red "), found
    assert "shorten it in data.train_files or data.val_files, or set data.filter_overlong_prompts=true" in found
    filtered = start(*runnable, *overrides, "data.filter_overlong_prompts=true")
    said = notes(preflight.check(filtered))
    assert any(f"1 of 5 prompts of data.train_files are left out, the first in {place}" in note for note in said)
    kept = DiffusionPromptDataset(filtered.data.train_files, config=filtered.data)
    assert len(kept) == 4 and kept[3]["row"].text == "a red circle"
    found = problem(start, *runnable, overrides[0], f"digen.sampling.negative_prompt={'red ' * 600}")
    assert found.startswith("digen.sampling.negative_prompt: a prompt must have at most 512 tokens for Wan, got 601")
    assert found.endswith("; shorten it")


PRECISION = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
ROLLOUT_FP32 = "actor_rollout_ref.rollout.dtype=float32"
FP16 = (f"{PRECISION}.param_dtype=fp16", "actor_rollout_ref.rollout.dtype=float16")


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (("digen.loss.clip_range=1e-5",), "digen.loss.clip_range=1e-05 is as narrow as the rounding of bf16 log-probs"),
        (
            ("digen.loss.clip_range=1e-3", "digen.loss.clip_range_high=5e-5"),
            "clip_range_high=5e-05 is as narrow as the rounding of bf16",
        ),
        (("digen.loss.clip_range=1e-4",), None),
        (("digen.loss.clip_range=1e-5", ROLLOUT_FP32), None),
        (("digen.loss.clip_range=1e-5", "digen.loss.old_log_probs=auto"), None),
        ((*FP16, "digen.loss.clip_range=2e-5"), None),
        ((*FP16, "digen.loss.clip_range=1e-5"), "rounding of fp16 log-probs (up to 6e-06)"),
        # the coarser of the two
        ((f"{PRECISION}.param_dtype=bf16", "digen.loss.clip_range=2e-5", ROLLOUT_FP32), "rounding of bf16"),
        # clips its ratio to recorded log-probs whatever old_log_probs is
        (("digen.loss.name=gspo", "digen.loss.clip_range=1e-5"), "which with digen.loss.name=gspo are compared"),
        (("digen.loss.name=cispo", "digen.loss.mask=true", "digen.loss.low=1e-5"), "digen.loss.low=1e-05 is as narrow"),
        (("digen.loss.name=cispo", "digen.loss.low=1e-5"), None),
        (("digen.loss.name=tis",), None),
        # clips against forwards of the trainer
        (("digen.loss.name=decoupled_ppo", "digen.loss.clip_range=1e-5", "digen.loss.old_log_probs=auto"), None),
        (("digen.loss.name=grpo_guard", "digen.loss.old_log_probs=auto"), None),
    ],
)
def test_a_clip_range_that_rounding_fills_is_noted(start, runnable, overrides, noted):
    recorded = ("actor_rollout_ref.rollout.dtype=bfloat16", "digen.loss.old_log_probs=rollout")
    found = [note for note in notes(StartConfig(start(*runnable, *recorded, *overrides))) if "rounding" in note]
    assert ([noted in note for note in found] == [True]) if noted else not found


def test_a_solver_other_than_the_checkpoints_is_noted(start, runnable, tmp_path):
    assert not any("the checkpoint names" in note for note in notes(StartConfig(start(*runnable))))
    wan = build_tiny("wan2.1", tmp_path / "wan")
    changes = [*runnable, f"actor_rollout_ref.model.path={wan}"]
    (note,) = [note for note in notes(StartConfig(start(*changes))) if "the checkpoint names" in note]
    assert "names UniPCMultistepScheduler: its sigmas are used, in training with digen.sampling.solver=euler" in note
    assert note.endswith("; digen.sampling.val_solver=unipc is its solver")
    assert not any(
        "names UniPC" in note for note in notes(StartConfig(start(*changes, "digen.sampling.val_solver=unipc")))
    )


@pytest.mark.parametrize(("checkpoint", "noted"), [("sd3", False), ("qwen_image", True)])
def test_fp16_is_noted_where_a_network_may_overflow(start, runnable, tmp_path, checkpoint, noted):
    path = build_tiny(checkpoint, tmp_path / "checkpoint")
    found = notes(StartConfig(start(*runnable, f"actor_rollout_ref.model.path={path}", *FP16)))
    assert any("its activations may overflow fp16" in note for note in found) == noted
    assert not any("replicas compute in" in note for note in found)


def test_weights_that_train_in_16_bits_are_noted(start, runnable):
    def noted(*changes: str) -> list[str]:
        words = "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", *changes
        return [note for note in notes(StartConfig(start(*runnable, *words))) if "model_dtype=bf16" in note]

    assert not noted("actor_rollout_ref.model.lora_rank=4")
    (found,) = noted("actor_rollout_ref.model.lora_rank=0")
    assert found.endswith("updates that are small beside a weight are lost; set it to fp32")


def test_dtypes_of_trainer_and_replicas_that_differ_are_noted(start, runnable):
    found = notes(StartConfig(start(*runnable, f"{PRECISION}.param_dtype=fp16")))
    assert any("replicas compute in fp32 (actor_rollout_ref.rollout.dtype) and the trainer in fp16" in n for n in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{PRECISION}.reduce_dtype=bf16",), f"{PRECISION}.reduce_dtype must be fp32 with"),
        (("actor_rollout_ref.actor.fsdp_config.model_dtype=fp16",), "model_dtype must be fp32 where all weights are"),
        (("actor_rollout_ref.actor.fsdp_config.model_dtype=fp16", "actor_rollout_ref.model.lora_rank=4"), None),
        ((), None),
    ],
)
def test_training_in_fp16_has_fp32_sums_and_weights(start, runnable, overrides, message):
    config = start(*runnable, *FP16, *overrides)
    if message is None:
        check_precision(StartConfig(config))
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_precision(StartConfig(config))


SHARING = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "size", "is_noted"), [(1, 4, 2, False), (2, 2, 4, True), (2, 3, 2, True)]
)
def test_ranks_of_two_nodes_that_share_rows_are_noted(start, runnable, num_nodes, num_devices, size, is_noted):
    pool = (f"trainer.nnodes={num_nodes}", f"trainer.n_gpus_per_node={num_devices}", f"{SHARING}={size}")
    found = [note for note in notes(StartConfig(start(*runnable, *pool))) if "lie on two nodes" in note]
    assert len(found) == is_noted


@pytest.mark.parametrize(("rollout", "is_told"), [("vllm_omni", True), ("diffusers", False)])
def test_a_run_is_told_where_steps_of_a_tree_are_not_shared(start, runnable, rollout, is_told):
    config = start(*runnable, *TREES, f"actor_rollout_ref.rollout.name={rollout}")
    found = [note for note in notes(StartConfig(config)) if "runs the steps of a tree" in note]
    assert len(found) == is_told


TREES = ("digen.branches.splits=[0,2]", "digen.sampling.shared_initial_noise=true", "actor_rollout_ref.rollout.n=4")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.n=4", None),
        ("actor_rollout_ref.rollout.n=6", "actor_rollout_ref.rollout.n must be 4 with digen.branches.splits=[0,2] and"),
        ("digen.branches.factor=3", "actor_rollout_ref.rollout.n must be 9 with digen.branches.splits=["),
        ("digen.branches.splits=[2,0]", "digen.branches.splits must be steps >= 0 in ascending order, got [2, 0]"),
        ("digen.branches.splits=[0,9]", "digen.branches.splits must lie within the 9 stochastic steps of"),
        ("digen.sampling.shared_initial_noise=false", "digen.sampling.shared_initial_noise must be true with digen.br"),
        ("digen.loss.name=gspo", "digen.branches.splits must be [] with digen.loss.name=gspo, whose rows compare all"),
        ("digen.loss.name=diffusion_nft", "digen.branches.splits must be [] with digen.loss.name=diffusion_nft, whose"),
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
            "default_agent_loop must be diffusion_single_turn with digen.branches.",
        ),
    ],
)
def test_a_tree_that_cannot_be_grown_is_refused(start, runnable, override, message):
    overrides = *runnable, "digen.sampling.num_steps=10", *TREES, override
    if message is None:
        return preflight.check(start(*overrides))
    assert message in problem(start, *overrides)


def test_recipes_of_objectives_have_their_published_numbers(start):
    """MixGRPO's finetune_flux_grpo_MixGRPO.sh, GenRL for Wan, flow_grpo's grpo_guard.py, UniRL's FlowDPPO,
    BranchGRPO's finetune_flux_branchgrpo_8gpus.sh."""
    mix, longcat, guard, dppo, branch, gdpo = (
        digen_config(start(f"recipe={recipe}"))
        for recipe in (
            *("[digen_flux,mixgrpo]", "[digen_wan2_1,longcat]", "[digen_sd3,guard]", "[digen_sd3,dppo]"),
            "[digen_flux,branch]",
            "[digen_sd3,ocr,pickscore,gdpo]",
        )
    )
    window = mix.window
    assert (window.kind, window.size, [*(window.range or ())], window.shift_every) == ("consecutive", 4, [0, 4], 25)
    assert (mix.sampling.num_steps, mix.sampling.shared_initial_noise, mix.kl.coef) == (25, True, 0.0)
    assert (mix.sde.law, mix.sde.noise_level, mix.loss_settings.clip_range) == ("flow", 0.7, 1e-4)
    assert (mix.advantage.scale, mix.advantage.ddof, mix.advantage.eps) == ("group", 1, 1e-8)
    assert (longcat.loss_name, longcat.loss_settings.clip_range, longcat.sde.law) == ("longcat", 1e-3, "flow_clipped")
    assert (longcat.kl.kind, longcat.kl.coef, longcat.sde.noise_level) == ("longcat", 3e-4, 1.0)
    assert (longcat.window.size, [*(longcat.window.range or ())], longcat.advantage.scale) == (1, [0, 6], "max_group")
    assert (guard.loss_name, guard.loss_settings.clip_range, guard.kl.coef) == ("grpo_guard", 2e-6, 0.0)
    assert (guard.advantage.scale, guard.window.kind, guard.sde.law) == ("group", "all", "flow")
    assert (dppo.loss_name, dppo.loss_settings.kl_threshold, dppo.window.size) == ("flow_dppo", 1e-5, 3)
    assert (branch.branches.splits, branch.branches.factor, branch.sampling.num_steps) == ((0, 3, 6, 9), 2, 20)
    assert (branch.sde.law, branch.sde.noise_level, branch.loss_settings.clip_range) == ("dance", 0.3, 1e-3)
    assert (branch.advantage.scale, branch.advantage.ddof, branch.loss_settings.advantage_bound) == ("group", 1, 5.0)
    assert (gdpo.reward.combine, gdpo.advantage.scale, gdpo.reward.weights(has_custom=False).keys()) == (
        "gdpo",
        "batch",
        {"ocr", "pickscore"},
    )


@pytest.mark.parametrize(
    ("checkpoint", "size", "message"),
    [
        ("wan2.1", 3, f"{SHARING} must divide the 2 attention heads of this Wan checkpoint, got 3; choose one of 1, 2"),
        ("sd3", 3, f"{SHARING} must be 1 for Stable Diffusion 3, whose network (SD3Transformer2DModel) has no plan"),
    ],
)
def test_a_checkpoint_that_ranks_cannot_share_is_refused_before_anything_starts(
    start, runnable, tmp_path, checkpoint, size, message
):
    path = build_tiny(checkpoint, tmp_path / "checkpoint")
    config = (f"actor_rollout_ref.model.path={path}", "trainer.n_gpus_per_node=3", f"{SHARING}={size}")
    assert message in problem(start, *runnable, *config)


def test_images_for_a_model_that_reads_none_are_refused(start, runnable, tiny_video, tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 4 + '{"prompt": "b", "images": ["a.png"]}\n')
    overrides = [f"actor_rollout_ref.model.path={tiny_video}", f"data.train_files={tmp_path / 'p.jsonl'}"]
    found = problem(start, *runnable, *overrides)
    assert found == (
        f"line 5 of '{tmp_path / 'p.jsonl'}' must have no images for Wan, got 1; choose a checkpoint that reads them, "
        "or rename the column 'images'"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "digen.sampling.image_sizes=qwen_image_edit",
            "digen.sampling.image_sizes must be flux_kontext for FLUX.1 Kontext, got 'qwen_image_edit'; set it",
        ),
        (
            "digen.sampling.planned_images=2",
            "digen.sampling.planned_images must be null or lie in [0, 1] for FLUX.1 Kontext, got 2; null plans 0",
        ),
        ("digen.sampling.image_sizes=flux", "digen.sampling.image_sizes must be one of qwen_image_edit, flux_kontext"),
        ("digen.sampling.planned_images=1", None),
    ],
)
def test_sizes_of_images_are_those_of_the_models_pipeline(start, runnable, tmp_path, override, message):
    path = build_tiny("flux_kontext", tmp_path / "checkpoint")
    overrides = f"actor_rollout_ref.model.path={path}", "digen.sampling.image_sizes=flux_kontext", override
    if message is None:
        return preflight.check(start(*runnable, *overrides))
    assert problem(start, *runnable, *overrides).startswith(message)


@pytest.mark.parametrize(
    ("checkpoint", "pipeline"), [("qwen_image", "QwenImageLayeredPipeline"), ("wan2.1", "LTXPipeline")]
)
def test_a_pipeline_that_is_not_supported_is_refused_before_anything_starts_whatever_its_transformer(
    start, runnable, tmp_path, checkpoint, pipeline
):
    """The first has the transformer of the pipeline that the checkpoint was made for."""
    path = build_tiny(checkpoint, tmp_path / "checkpoint")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"_class_name": pipeline}))
    found = problem(start, *runnable, f"actor_rollout_ref.model.path={path}")
    assert found.startswith("actor_rollout_ref.model.path must hold a checkpoint of one of Flux2KleinPipeline, "), found
    assert f"got a {pipeline}, which is not supported" in found
    assert len(found.splitlines()) == 1


def test_a_network_that_is_not_the_pipelines_is_refused(start, runnable, tiny_video):
    index = json.loads((tiny_video / "model_index.json").read_text())
    other = {"transformer": ["diffusers", "LTXVideoTransformer3DModel"]}
    (tiny_video / "model_index.json").write_text(json.dumps(index | other))
    found = problem(start, *runnable, f"actor_rollout_ref.model.path={tiny_video}")
    assert "must hold a WanTransformer3DModel for Wan, got LTXVideoTransformer3DModel" in found


def test_a_checkpoint_that_vllm_omni_does_not_serve_is_refused_before_anything_starts(start, runnable, tmp_path):
    path = build_tiny("hunyuan_video", tmp_path / "hunyuan")
    overrides = [f"actor_rollout_ref.model.path={path}", "digen.sampling.num_frames=5"]
    preflight.check(start(*runnable, *overrides))
    found = problem(start, *runnable, *overrides, "actor_rollout_ref.rollout.name=vllm_omni")
    assert "name=vllm_omni needs a checkpoint of one of Flux2KleinPipeline, " in found
    assert "got 'HunyuanVideoPipeline'; set actor_rollout_ref.rollout.name=diffusers" in found


def test_other_steps_than_those_of_a_distilled_checkpoint_are_refused_before_anything_starts(start, runnable, tmp_path):
    path = build_tiny("qwen_image21", tmp_path / "turbo")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.9, 0.4]}))
    given = [
        f"actor_rollout_ref.model.path={path}",
        *(f"digen.sampling.{side}=64" for side in ("height_px", "width_px")),
    ]
    found = problem(start, *runnable, *given, "digen.sampling.num_steps=3", "digen.sampling.val_num_steps=8")
    assert "num_steps and val_num_steps must be 3 for this Qwen-Image-2.1 checkpoint" in found and "got 8; set" in found
    steps = [f"digen.sampling.{key}=3" for key in ("num_steps", "val_num_steps")]
    check_model(StartConfig(start(*runnable, *given, *steps)))


def test_an_adapter_that_vllm_omni_cannot_bind_is_refused_before_anything_starts(start, runnable, tmp_path):
    path = build_tiny("hunyuan_video15", tmp_path / "hunyuan15")
    served = [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.name=vllm_omni"]
    check_model(StartConfig(start(*runnable, *served)))
    for rank in ("actor_rollout_ref.model.lora_rank=4", "+actor_rollout_ref.model.lora.rank=4"):
        served_adapter = [*served, rank]
        found = problem(start, *runnable, *served_adapter)
        assert "actor_rollout_ref.model.exclude_modules must leave out refiner_blocks for an adapter" in found
        assert "got None; set it to '.*refiner_blocks.*', or actor_rollout_ref.model.lora.merge=true" in found
        for remedy in ("exclude_modules='.*refiner_blocks.*'", "lora.merge=true", "target_modules=[attn.add_q_proj]"):
            check_model(StartConfig(start(*runnable, *served_adapter, f"actor_rollout_ref.model.{remedy}")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{SHARING}=2", "trainer.n_gpus_per_node=2"), f"{SHARING} must be 1 for Wan2.2 TI2V and prompts with images"),
        (("digen.sampling.num_frames=1",), "digen.sampling.num_frames must be >= 5 for Wan2.2 TI2V"),
        (("actor_rollout_ref.rollout.name=vllm_omni",), None),
        ((), None),
    ],
    ids=["trainer", "picture", "vllm-omni", "runs"],
)
def test_a_first_frame_is_refused_where_nothing_reads_it(start, runnable, tmp_path, overrides, message):
    """Texts alone pass."""
    path = build_tiny("wan2.2_ti2v_5b", tmp_path / "ti2v")
    draw_image(tmp_path / "a.png", (64, 64))
    texts, both = tmp_path / "texts.jsonl", tmp_path / "both.jsonl"
    texts.write_text('{"prompt": "a"}\n' * 4)
    both.write_text(texts.read_text() + '{"prompt": "b", "images": ["a.png"]}\n')
    given = [*runnable, f"actor_rollout_ref.model.path={path}", "digen.sampling.num_frames=5"]
    given += ["digen.sampling.image_sizes=wan_ti2v", *overrides]
    of_texts, of_both = (
        start(*given, *(f"data.{part}_files={file}" for part in ("train", "val"))) for file in (texts, both)
    )
    check_prompts(StartConfig(of_texts))
    check_model(StartConfig(of_texts))
    with nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message)):
        check_prompts(StartConfig(of_both))
    if message is not None and "num_frames" not in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_model(StartConfig(start(*given, "digen.sampling.planned_images=1")))


@pytest.mark.parametrize(
    ("model", "key", "size"),
    [("sd3", "latent_channels", ""), ("flux_dev", "latent_channels", ""), ("wan2.1", "z_dim", "num_frames=5")],
)
def test_a_vae_with_other_channels_than_its_network_is_refused(start, runnable, tmp_path, model, key, size):
    path = build_tiny(model, tmp_path / model)
    given = [*runnable, f"actor_rollout_ref.model.path={path}", *([f"digen.sampling.{size}"] if size else [])]
    check_model(StartConfig(start(*given)))
    other = changed(path, tmp_path / "other", "vae/config.json", {key: 16})
    with pytest.raises(ValueError, match=r"VAE with the 4 channels of its transformer's latents, got 16; take both"):
        check_model(StartConfig(start(*given, f"actor_rollout_ref.model.path={other}")))


def test_guidance_of_a_distilled_checkpoint_is_refused(start, runnable, tmp_path):
    """diffusers' pipeline runs it without, and says so in a warning."""
    path = build_tiny("flux2_klein", tmp_path / "klein")
    given = [*runnable, f"actor_rollout_ref.model.path={path}", "digen.sampling.image_sizes=flux2"]
    guided = [*given, "digen.sampling.true_cfg_scale=4.0"]
    check_model(StartConfig(start(*guided)))
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    check_model(StartConfig(start(*given)))
    for key in ("true_cfg_scale", "val_true_cfg_scale"):
        message = rf"digen\.sampling\.{key} must be 1 for this distilled FLUX\.2 \[klein\], .* got 4\.0; set it to 1"
        with pytest.raises(ValueError, match=message):
            check_model(StartConfig(start(*given, f"digen.sampling.{key}=4.0")))


def test_an_image_that_a_pipeline_does_not_take_is_refused_before_anything_starts(start, runnable, tmp_path):
    path = build_tiny("flux2_klein", tmp_path / "klein")
    for name, size in (("good", (64, 80)), ("small", (80, 63))):
        draw_image(tmp_path / f"{name}.png", size)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for name in ("good", "small", "broken"):
        rows = ['{"prompt": "a"}', '{"prompt": "b", "images": ["good.png"]}']
        rows += ['{"prompt": "c"}', f'{{"prompt": "d", "images": ["good.png", "{name}.png"]}}']
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    given = [*runnable, f"actor_rollout_ref.model.path={path}", "digen.sampling.image_sizes=flux2"]
    for rollout in ("diffusers", "vllm_omni"):
        served = [*given, f"actor_rollout_ref.rollout.name={rollout}", f"data.train_files={tmp_path}/good.jsonl"]
        check_prompts(StartConfig(start(*served)))
        check_model(StartConfig(start(*served, "digen.sampling.planned_images=4")))
    for name, message in (
        ("small", r"sides of 64 px or more, got 80 x 63 px in '.*small\.png'; enlarge it"),
        ("broken", r"be a picture file, got '.*broken\.png' "),
    ):
        with pytest.raises(ValueError, match=rf"line 4 of '.*{name}\.jsonl': an image of a prompt must .*{message}"):
            check_prompts(StartConfig(start(*given, f"data.train_files={tmp_path}/{name}.jsonl")))


@pytest.mark.long
@pytest.mark.parametrize("recipe", [*MODEL_RECIPES, *in_grid(MORE_RECIPES)])
def test_the_published_checkpoint_of_a_recipe_makes_what_the_recipe_asks_for(start, recipe):
    """From the configs that `digen plan` has, so without a download."""
    config = start(f"recipe={recipe}")
    with checkpoint_folder(config.actor_rollout_ref.model.path) as folder:
        config.actor_rollout_ref.model.path = str(folder)
        check_model(StartConfig(config))
        check_digen(StartConfig(config))


def test_verls_loaders_are_made_where_a_run_does_not_validate_and_names_no_prompts_for_it(start, runnable):
    never = "data.val_files=null", "trainer.test_freq=-1", "trainer.val_before_train=false"
    config = start(*runnable, *never, "data.validation_shuffle=true")
    preflight.check(config)
    allow_no_prompts(config)
    trainer: Any = SimpleNamespace(
        config=config, trainer_mode="sync", tokenizer=None, processor=None, parameter_sync_step=1
    )
    PPOTrainer._init_dataloader(trainer)
    assert len(trainer.train_dataset) == 8 and list(trainer.val_dataloader) == []


def test_a_plugin_that_failed_refuses_the_run_and_names_the_cause(start, runnable):
    plugin.FAILURES.append("its engine could not be registered (ImportError: diffusers)")
    try:
        assert "its engine could not be registered (ImportError: diffusers)" in problem(start, *runnable)
    finally:
        plugin.FAILURES.pop()


def test_verl_alone_has_no_callback(start):
    assert not OmegaConf.select(start(), "hydra.callbacks")


def test_main_shows_a_paragraph_and_writes_nothing(tmp_path):
    refused = start_main("recipe=digen_quickstart", cwd=tmp_path)
    shown = start_main("recipe=digen_flowgrpo", "--cfg", "job", cwd=tmp_path)
    _, stderr = refused.communicate(timeout=120)
    assert refused.returncode == 2, stderr
    assert "verl-digen: this config cannot run.\n" in stderr
    assert "actor_rollout_ref.model.path must be" in stderr
    assert "examples/ is a folder of the repository" in stderr  # what a new user lacks
    assert "Traceback" not in stderr
    stdout, _ = shown.communicate(timeout=120)
    assert shown.returncode == 0 and "digen:\n" in stdout
    assert list(tmp_path.iterdir()) == []


def test_the_quickstart_fits_any_machine_with_a_gpu(compose_main, monkeypatch):
    """Composed as there: on a CPU another recipe asks for one device."""
    cuda = SimpleNamespace(device_name="cuda", communication_backend_name=lambda: "nccl")
    monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: cuda)
    config = compose_main("recipe=digen_quickstart")
    assert config.trainer.device == "cuda"
    require_devices(StartConfig(config), 1)
    for found in range(1, 17):
        config.trainer.n_gpus_per_node = int(
            quickstart_override(found, 64).removeprefix("trainer.n_gpus_per_node=") or 1
        )
        require_devices(StartConfig(config), found)
        assert config.data.train_batch_size % config.trainer.n_gpus_per_node == 0


def test_a_run_asks_for_no_more_devices_than_the_machine_has(start):
    config = start("recipe=digen_flowgrpo", "trainer.n_gpus_per_node=8")
    require_devices(StartConfig(config), 8)
    rule = r"^trainer\.nnodes x trainer\.n_gpus_per_node \(8\) must be <= 1, the devices of this machine, got 8; set"
    with pytest.raises(ValueError, match=rule):
        require_devices(StartConfig(config), 1)
    split = start("recipe=digen_flowgrpo+disaggregated", "trainer.n_gpus_per_node=8")
    with pytest.raises(ValueError, match=r"\(8\) \+ actor_rollout_ref\.rollout\.nnodes x .* shared by the pools"):
        require_devices(StartConfig(split), 8)


def test_a_cpu_has_a_logical_device_for_every_rank_and_replica(start, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("verl_digen.processes.cluster.find_bootstrap_address", lambda folder: None)
    devices = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=3")
    config = start("recipe=digen_flowgrpo+disaggregated", *devices, "++ray_kwargs.ray_init.num_gpus=5")
    check_device(StartConfig(config))
    config.ray_kwargs.ray_init.num_gpus = 4
    with pytest.raises(ValueError, match=r"num_gpus must be >= 5, the devices of the run, .*got 4"):
        check_device(StartConfig(config))


@pytest.fixture
def machine(monkeypatch):
    """`machine(4)`: this machine has 4 CPUs and a GPU, and no Ray runs on it."""

    def become(num_cpus):
        cuda = SimpleNamespace(device_name="cuda", communication_backend_name=lambda: "nccl", device_count=lambda: 8)
        monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: cuda)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr("verl_digen.processes.cluster.find_bootstrap_address", lambda folder: None)
        monkeypatch.setenv("RAY_USE_MULTIPROCESSING_CPU_COUNT", "1")
        monkeypatch.setattr("multiprocessing.cpu_count", lambda: num_cpus)

    return become


UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"


@pytest.mark.parametrize(
    ("num_cpus", "address", "units", "agents", "rewards", "readers"),
    [(8, None, 2, 1, 2, 0), (16, None, 2, 1, 2, 0), (17, None, 2, 8, 8, 8), (8, "10.0.0.1:6379", 8, 8, 8, 8)],
)
def test_a_machine_with_few_cpus_starts_few_processes(
    compose_main, machine, monkeypatch, num_cpus, address, units, agents, rewards, readers
):
    machine(num_cpus)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = compose_main("recipe=digen_flowgrpo")
    assert config.transfer_queue.backend.SimpleStorage.num_data_storage_units == units
    assert config.actor_rollout_ref.rollout.agent.num_workers == agents
    assert (config.reward.num_workers, config.data.dataloader_num_workers) == (rewards, readers)
    assert compose_main("recipe=digen_flowgrpo", "reward.num_workers=5").reward.num_workers == 5


def test_a_run_reserves_no_more_cpus_than_the_machine_has(compose_main, machine):
    machine(6)
    flow = "recipe=digen_flowgrpo", "trainer.n_gpus_per_node=1"
    config = compose_main(*flow)
    check_cpus(StartConfig(config))
    machine(5)
    with pytest.raises(ValueError) as refused:
        check_cpus(StartConfig(config))
    assert str(refused.value) == (
        "ray_kwargs.ray_init.num_cpus must be >= 6, what Ray reserves for trainer.nnodes x trainer.n_gpus_per_node "
        f"(3), TransferQueue's controller (1), {UNITS} (2), and null counts the 5 of this machine, got None; set "
        f"ray_kwargs.ray_init.num_cpus=6, because Ray only counts these CPUs, or {UNITS}=1"
    )
    check_cpus(StartConfig(compose_main(*flow, f"{UNITS}=1")))
    check_cpus(StartConfig(compose_main(*flow, "ray_kwargs.ray_init.num_cpus=6")))
    with pytest.raises(ValueError, match=r"num_cpus must be >= 12, .*num_data_storage_units \(8\), got 11; set"):
        check_cpus(StartConfig(compose_main(*flow, f"{UNITS}=8", "ray_kwargs.ray_init.num_cpus=11")))
    with pytest.raises(ValueError, match=r"num_cpus=6, because Ray only counts these CPUs$"):  # one unit: 5
        check_cpus(StartConfig(compose_main(*flow, "ray_kwargs.ray_init.num_cpus=4")))
    check_plannable(compose_main(*flow, "actor_rollout_ref.model.path=a/checkpoint"))  # a plan is of another machine


@pytest.mark.parametrize(
    ("changes", "reserved"),
    [
        ([], 6),
        (["trainer.n_gpus_per_node=2"], 9),
        (["recipe=digen_flowgrpo+disaggregated", "actor_rollout_ref.rollout.n_gpus_per_node=1"], 8),
        (["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"], 6),
        (["digen.reward.functions={jpeg_compressibility: {weight: 1, num_workers: 3}}"], 9),
        (["digen.reward.functions={diversity: {weight: 1, timeshare: true}}"], 6),
        (["digen.reward.recipe_functions.jpeg_incompressibility=1", "digen.placement.reward_accelerator=H100"], 8),
        (["transfer_queue.backend.storage_backend=MooncakeStore"], 4),
    ],
)
def test_what_reserves_cpus_is_counted(compose_main, machine, changes, reserved):
    machine(8)
    recipe = [] if changes and changes[0].startswith("recipe=") else ["recipe=digen_flowgrpo"]
    config = compose_main(*recipe, "trainer.n_gpus_per_node=1", *changes)
    assert sum(reserved_cpus(StartConfig(config)).values()) == reserved


def test_a_key_that_is_missing_is_told_where_it_has_an_effect(compose_main):
    config = compose_main("recipe=digen_flowgrpo")
    with open_dict(config):
        del config.actor_rollout_ref.actor.use_kl_loss, config.trainer.nnodes
    assert unused_problems(StartConfig(config)) == []
    assert str(value_problems(config)["trainer.nnodes"]).endswith("got None; give the devices of a node, and the nodes")


def test_a_rule_that_writes_is_told_and_writes_nothing(compose_main):
    config = compose_main("recipe=digen_flowgrpo")

    def write(run: StartConfig) -> None:
        run.config.trainer.nnodes = 7

    with pytest.raises(ValueError, match="read-only"):
        preflight.check(config, [write])
    assert config.trainer.nnodes == 1


def test_cpus_of_a_cluster_that_runs_are_not_those_of_this_machine(compose_main, machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_cpus(StartConfig(compose_main("recipe=digen_flowgrpo")))


def test_a_python_that_ray_cannot_start_is_refused(compose_main, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr("sys.executable", "/home/me/my env/bin/python")
    with pytest.raises(ValueError, match=r"no blanks, .* got '/home/me/my env/bin/python'; make"):
        check_address(StartConfig(compose_main("recipe=digen_flowgrpo")))


def test_a_home_where_ray_cannot_keep_its_token_is_refused_unless_a_token_is_given(compose_main, monkeypatch, tmp_path):
    run = StartConfig(compose_main("recipe=digen_flowgrpo"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"HOME must be a folder that can be written, .*/file' \(NotADirectoryError: "):
        check_address(run)
    monkeypatch.setenv("HOME", str(tmp_path))
    check_address(run)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    check_address(run)


def test_a_temporary_folder_where_ray_cannot_start_is_refused(compose_main, monkeypatch, tmp_path):
    run = StartConfig(compose_main("recipe=digen_flowgrpo"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match=r"TMPDIR must be .* can be written, .*below' \(NotADirectoryError: .*; take"):
        check_address(run)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    with pytest.raises(ValueError, match=r"TMPDIR must be a folder of at most 4\d bytes, .*xxx'; take /tmp, or"):
        check_address(run)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_address(run)
    OmegaConf.update(run.config, "ray_kwargs.ray_init._temp_dir", str(tmp_path / ("x" * 60)), force_add=True)
    with pytest.raises(ValueError, match=r"ray_kwargs\.ray_init\._temp_dir must be a folder of at most 4\d bytes"):
        check_address(run)


def test_devices_of_a_cluster_that_runs_are_not_those_of_this_machine(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("verl_digen.processes.cluster.find_bootstrap_address", lambda folder: None)
    assert [joins_cluster(address) for address in (None, "auto", "local", "10.0.0.1:6379")] == [
        False,
        False,
        False,
        True,
    ]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert joins_cluster(None)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["digen.ema.max_decay=0.99"], "digen.ema.max_decay must be 0.9 with digen.ema.enable=false"),
        (["digen.ema.every_steps=2"], "digen.ema.every_steps must be 8 with digen.ema.enable=false"),
        (["digen.kl.kind=velocity"], "digen.kl.kind must be flow_grpo with digen.kl.coef=0"),
        (["digen.sampling.sa_high=0.5"], "digen.sampling.sa_high must be 0.9 without digen.sampling.solver=sa"),
        (
            ["digen.reward.custom_weight=2"],
            "digen.reward.custom_weight must be 1.0 with reward.custom_reward_function.pa",
        ),
        (["digen.window.size=3"], "digen.window.size must be 2 without digen.window.kind=consecutive"),
        (["digen.window.range=[0,3]"], "; type digen.window.kind: consecutive, or the one meant"),
        (["digen.window.fraction=0.3"], "digen.window.fraction must be 0.6 without digen.window.kind=fraction"),
        (["digen.branches.factor=3"], "digen.branches.factor must be 2 with digen.branches.splits=[]"),
        (["digen.kl.kind=velocity", "digen.kl.coef=0.1"], None),
        (["digen.ema.max_decay=0.99", "digen.ema.enable=true"], None),
    ],
)
def test_keys_that_a_switch_leaves_unread_are_refused(start, runnable, typed, message):
    found = effect_problems(StartConfig(start(*runnable, *typed)))
    assert [message in problem for problem in found] == ([True] if message else [])


@pytest.mark.parametrize("recipe", ["digen_wan2_1+longcat", "digen_sd3+dgpo", "digen_sd3", "digen_flux+awm"])
@pytest.mark.parametrize(
    "off", ["digen.kl.coef=0", "digen.ema.enable=false digen.ema.validate=false", "digen.sampling.solver=euler"]
)
def test_a_switch_that_is_typed_leaves_a_recipes_keys_alone(start, runnable, recipe, off):
    others = [one for one in runnable if not one.startswith("recipe=")]
    assert effect_problems(StartConfig(start(f"recipe={recipe}", *others, *off.split()))) == []


def test_what_looks_like_a_setting_in_a_prompt_file_is_noted(start, runnable, tmp_path):
    rows = [
        {
            "prompt": f"{mark} cats",
            "seed": 1,
            "guidanceScale": 2,
            "Image_Height": 32,
            "heights": 1,
            "negative_prompt": "b",
        }
        for mark in ("<image>", "<|image_pad|>", "<IMG_0>", "[IMG]")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    said = "\n".join(notes(StartConfig(start(*runnable, f"data.train_files={tmp_path / 'rows.jsonl'}"))))
    assert "columns Image_Height, guidanceScale, seed of the prompts go to the rewards alone" in said
    assert (
        "negative_prompt of 4 prompts is not read: digen.sampling.true_cfg_scale and val_true_cfg_scale are 1" in said
    )
    assert "rows.jsonl' and 3 more have marks such as <image>" in said and "column 'images'" in said
    guided = start(*runnable, f"data.train_files={tmp_path / 'rows.jsonl'}", "digen.sampling.true_cfg_scale=3")
    assert not any("is not read" in note for note in notes(StartConfig(guided)))
    assert not any("columns" in note or "marks" in note for note in notes(StartConfig(start(*runnable))))


@pytest.mark.parametrize(("steps", "is_noted"), [("60", True), ("8", False), ("null", False)])
def test_the_steps_that_were_asked_for_are_taken(start, runnable, steps, is_noted):
    config = start(*runnable, f"trainer.total_training_steps={steps}", "trainer.total_epochs=4")
    said = "trainer.total_training_steps=60 are 30 passes over data.train_files: the run takes them all"
    assert any(said in note for note in notes(StartConfig(config))) == is_noted
    take_all_steps(config)
    assert config.trainer.total_epochs == {"60": 60, "8": 8, "null": 4}[steps]


def test_a_warm_up_that_is_longer_than_the_run_is_noted(start, runnable):
    warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    said = f"{warmup}=100 is more than the 5 steps of the run: the learning rate reaches 4% of"
    five = [*runnable, "trainer.total_training_steps=5"]
    assert any(note.startswith(said) for note in notes(StartConfig(start(*five, f"{warmup}=100"))))
    assert not any("warmup" in note for note in notes(StartConfig(start(*five, f"{warmup}=4"))))


def test_columns_that_hold_an_edits_images_are_named(start, runnable, tmp_path):
    rows = [{"prompt": "a", "image": "a.png", "note": "b"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    path = build_tiny("qwen_image_edit_plus", tmp_path / "edit")
    overrides = f"actor_rollout_ref.model.path={path}", f"data.train_files={tmp_path / 'rows.jsonl'}"
    assert "got 0; set data.image_key=image, the column that has paths" in problem(start, *runnable, *overrides)


def test_an_image_in_a_table_that_is_no_picture_is_refused(start, runnable, tmp_path):
    path, file = build_tiny("qwen_image_edit_plus", tmp_path / "edit"), tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 4, "images": [[{"bytes": b"<svg/>", "path": None}]] * 4}), file)
    files = f"data.train_files={file}", f"data.val_files={file}"
    said = problem(start, *runnable, f"actor_rollout_ref.model.path={path}", *files)
    assert "row 1 of" in said and "an image of a prompt must be " in said
