# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM-Omni's engine, and configs that are refused before it starts."""

from types import SimpleNamespace

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass

from tests.models.cases import draw_image
from tests.tiny_models import build_tiny
from tests.vllm_omni.conftest import compose_actor_rollout, compose_config
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import MODELS, is_importable, load_model, model_class
from verl_digen.preflight.pools import check_vllm_omni
from verl_digen.preflight.start_config import StartConfig
from verl_digen.rollout.vllm_omni.settings import require_served
from verl_digen.sampling.requests import inputs_of
from verl_digen.types import Geometry


def arguments(path, *overrides):
    from verl_digen.rollout.vllm_omni.arguments import engine_arguments

    composed = compose_actor_rollout(path, *overrides)
    return engine_arguments(
        omega_conf_to_dataclass(composed.rollout), omega_conf_to_dataclass(composed.model), can_sleep=False
    )


@pytest.mark.parametrize(
    ("name", "is_stepwise", "max_num_seqs"),
    [
        *(("qwen_image", True, 8), ("sd3", False, 8), ("z_image", False, 1), ("wan2.1", False, 8)),
        *(("wan2.1_i2v", False, 8), ("hunyuan_video15_i2v", False, 1)),
    ],
)
def test_a_pipeline_runs_step_by_step_where_it_can_and_in_batches_where_it_can(
    tmp_path, name, is_stepwise, max_num_seqs
):
    made = arguments(build_tiny(name, tmp_path), "digen.rollout.batch_wait_s=0.02")
    assert (made["step_execution"], made["max_num_seqs"]) == (is_stepwise, max_num_seqs)
    assert made["request_batch_max_wait_ms"] == pytest.approx(100), "it ends where none came for a fifth of that"
    assert not made["enable_sleep_mode"], "no trainer needs its memory"


def test_the_vae_decodes_one_by_one_or_as_asked_and_in_tiles_where_a_diffusers_replica_does(tmp_path):
    def vae(path, *overrides):
        made = arguments(path, *overrides)
        return made["vae_use_slicing"], made["vae_use_tiling"]

    assert vae(build_tiny("sd3", tmp_path / "sd3")) == (True, False)
    stepwise = build_tiny("qwen_image", tmp_path / "qwen_image")
    assert vae(stepwise) == (False, False)
    assert arguments(stepwise, "digen.rollout.decode_batch_size=3")["custom_pipeline_args"]["decode_batch_size"] == 3
    path = build_tiny("hunyuan_video15", tmp_path / "hunyuan")
    assert vae(path) == (True, True)
    assert vae(path, "+actor_rollout_ref.rollout.engine_kwargs.vllm_omni.vae_use_tiling=false") == (True, False)


def test_every_pipeline_that_is_served_has_its_recorder_and_vllm_omni_has_it():
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    from verl_digen.rollout.vllm_omni.pipeline import recording_class
    from verl_digen.rollout.vllm_omni.recorder import RecordingPipeline

    served = [name for name in filter(is_importable, MODELS) if model_class(name).spec.vllm_omni is not None]
    for name in served:
        assert require_served(name).pipeline in DiffusionModelRegistry.models
        assert issubclass(recording_class(name), RecordingPipeline)


@pytest.mark.parametrize("name", ["wan2.2_ti2v_5b", "wan2.2_ti2v_5b_i2v"])
def test_a_given_first_frame_runs_in_the_pipeline_that_reads_the_indexs_flag(tmp_path, name):
    made = arguments(build_tiny(name, tmp_path))
    assert made["custom_pipeline_args"]["pipeline_class"].endswith(".pipeline.RecordingWanPipeline")
    assert made["custom_pipeline_args"]["external_lib"] is None
    assert made["model_class_name"] == "WanPipeline"


def test_an_engine_without_the_version_barrier_or_a_setting_is_an_error(tmp_path):
    from vllm_omni.diffusion.data import parse_attention_config

    from verl_digen.rollout.vllm_omni.arguments import OF_STAGE, check_taken

    key, path = "actor_rollout_ref.rollout.engine_kwargs.vllm_omni", build_tiny("sd3", tmp_path)
    given = f"+{key}.vae_use_tiling=true", f"+{key}.init_timeout=60"
    composed, made = compose_actor_rollout(path, *given), arguments(path, *given)
    kernel = parse_attention_config(attention_backend=made["diffusion_attention_config"]["default"]["backend"])
    taken = {name: made[name] for name in (*OF_STAGE, "vae_use_tiling")} | {"diffusion_attention_config": kernel}
    check_taken(made, composed.rollout, SimpleNamespace(**taken))
    for other, said in (
        ({"engine_backend": "default"}, r"engine_backend='verl_digen.*VersionedEngine' and runs with 'default'"),
        ({"vae_use_tiling": False}, f"{key}: vae_use_tiling was to be True, and vLLM-Omni runs with False; drop"),
        ({"diffusion_attention_config": None}, "diffusion_attention_config was to be .*, and vLLM-Omni runs with None"),
    ):
        with pytest.raises(RuntimeError, match=said):
            check_taken(made, composed.rollout, SimpleNamespace(**taken | other))


def test_a_pipeline_that_vllm_omni_lacks_is_refused_with_the_remedy(tmp_path):
    path = build_tiny("hunyuan_video", tmp_path)
    with pytest.raises(ValueError, match=r"got 'HunyuanVideoPipeline'; set actor_.*name=diff"):
        arguments(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.data_parallel_size=2", r"data_parallel_size must be 1 .*got 2"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", r"pipeline_model_parallel_size must be 1 .*got 2"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2",
            "must be 1 with .* on a CPU: vLLM-Omni runs a StableDiffusion3Pipeline in one go",
        ),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=64", r"must be <= \d+, the devices of a node, .*got 64"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm_omni.enable_cpu_offload=true",
            "enable_cpu_offload must be false for a pipeline that runs in one go",
        ),
    ],
    ids=str,
)
def test_what_a_replica_cannot_do_is_refused_before_ray_starts(tmp_path, override, message):
    path = build_tiny("sd3", tmp_path)
    check_vllm_omni(StartConfig(compose_config(path)))
    with pytest.raises(ValueError, match=message):
        check_vllm_omni(StartConfig(compose_config(path, *override.split())))


# -- images of video pipelines in a network's dtype; in fp32, `test_request_mode.py` compares whole samples --
def test_clip_encodes_in_fp32_where_the_network_runs_in_bf16(one_worker, tmp_path):
    """Tokens equal those of a `diffusers` replica bit for bit; vLLM-Omni itself loads CLIP in bf16."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from verl_digen.rollout.vllm_omni.pipeline import recording_class

    path = build_tiny("wan2.1_i2v", tmp_path / "checkpoint")
    config = OmniDiffusionConfig.from_kwargs(model=str(path), dtype="bfloat16")
    config.enrich_config()
    pipeline = recording_class("WanImageToVideoPipeline")(od_config=config)
    inputs = inputs_of("a red circle", (draw_image(tmp_path / "0.png", (90, 40), 0),), Geometry(64, 64, 5), 64)
    (expected,) = load_model(path).load_encoder(torch.bfloat16, torch.device("cpu"))([inputs])
    found = pipeline.encode_condition(inputs)
    assert found["image"].dtype == torch.bfloat16 and torch.equal(found["image"], expected["image"])
    assert torch.equal(found["embeds"], expected["embeds"])


def test_a_text_encoder_in_bf16_has_the_angles_of_positions_in_fp32(one_worker, tmp_path):
    """Tokens equal those of a `diffusers` replica bit for bit."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from verl_digen.rollout.vllm_omni.pipeline import recording_class

    path = build_tiny("flux2_klein", tmp_path / "checkpoint")
    config = OmniDiffusionConfig.from_kwargs(model=str(path), dtype="bfloat16")
    config.enrich_config()
    pipeline = recording_class("Flux2KleinPipeline")(od_config=config)
    inputs = PromptInputs("a red circle on a blue table")
    (expected,) = load_model(path).load_encoder(torch.bfloat16, torch.device("cpu"))([inputs])
    assert torch.equal(pipeline.encode_condition(inputs)["embeds"], expected["embeds"])
