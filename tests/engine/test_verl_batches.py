# SPDX-License-Identifier: Apache-2.0
"""verl's `train_batch`, `infer_batch` and `forward_step` on rows in a TensorDict, against logical batches."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tests.engine.harness import (
    LORA,
    SAMPLING,
    add_all,
    all_picks,
    are_equal,
    assert_close,
    fragment,
    log_probs,
    make_batch,
    make_engine,
    on_two_ranks,
    peek,
    perturb,
    read_samples,
    stepped_gradients,
    weights,
)
from tests.engine.harness import begin as begin_batch
from tests.engine.teacher import teacher_folder
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.optimizer import LossScale
from verl_digen.engine.rows import make_rows
from verl_digen.engine.verl_batches import own_objective, pack_rows, unpack_rows
from verl_digen.types import TrainingRows

pytestmark = pytest.mark.slow

PLAIN_STEPS = {"optimizer": "SGD", "lr": 0.1, "weight_decay": 0.0, "clip_grad": 1e9}
"""Steps in which rounding of a small gradient stays small."""
NFT = {"name": "diffusion_nft", "beta": 0.7, "kl_coef": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "flow_grpo": {},
    "flow_grpo_with_kl": {"digen": {"kl": {"coef": 0.3}, "loss": {"clip_range": 0.5}}},
    "flow_grpo_with_kl_and_lora": {"digen": {"kl": {"coef": 0.3}}, "model": LORA},
    "diffusion_nft": {"digen": {"loss": NFT, "advantage": {"scale": "group"}}},
}


OTHER = replace(SAMPLING, noise_level=0.3)


def case_engine(path: Path, case: str) -> DiffusersFSDPEngine:
    """Engine whose weights are not those of its copies."""
    engine = make_engine(path, optim=PLAIN_STEPS, **CASES[case])
    perturb(engine)
    return engine


def case_batch(path: Path, case: str) -> TensorDict:
    """Six samples of three points each; prompts differ in length."""
    batch = make_batch(path)
    if case != "diffusion_nft":
        return batch
    ends = {"clean": batch["latents"][:, -1], "sigmas": torch.tensor([[0.9, 0.6, 0.3]]).repeat(len(batch), 1)}
    facts = {name: tu.get(batch, name) for name in ("conditions", "sampling")}
    return tu.get_tensordict(ends | {"advantages": batch["advantages"], "uid": tu.get(batch, "uid")}, facts)


def rows_of(engine: DiffusersFSDPEngine, batch: TensorDict, **keys: Any) -> TensorDict:
    """All rows of a batch, with these keys beside them."""
    samples = replace(read_samples(batch), advantages=batch["advantages"])
    return tu.assign_non_tensor(pack_rows(make_rows(engine.points, samples, all_picks(samples))), **keys)


def rows_from(first: int, rows: TrainingRows, count: int = 1) -> TrainingRows:
    part = slice(first, first + count)
    sliced = {name: value[part] for name, value in vars(rows).items() if isinstance(value, Tensor | list)}
    point = {name: value[part] for name, value in vars(rows.point).items() if value is not None}
    return replace(rows, point=replace(rows.point, **point), **sliced)


def own_rows(rows: TensorDict) -> TensorDict:
    """The rows of this rank: of two ranks, 11 and 7."""
    if dist.get_world_size() == 1:
        return rows
    return rows[:11] if dist.get_rank() == 0 else rows[11:]


@dataclass
class Trained:
    """Results of one optimizer step."""

    loss: float
    gradient: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, Any]


def mean_loss(outputs: dict[str, Any]) -> float:
    """The batch's loss, as verl computes it of its ranks'."""
    loss = torch.stack(outputs["loss"]).sum()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def all_weights(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Weights that train, and those of copies that follow."""
    found = weights(engine, policy="current")
    for policy in engine.digen.loss_settings.copies:
        found |= {f"{policy} {name}": value for name, value in weights(engine, policy=policy).items()}
    return found


@cache
def by_logical_batch(path: Path, case: str) -> Trained:
    engine, batch = case_engine(path, case), case_batch(path, case)
    add_all(engine, batch)
    with stepped_gradients(engine) as gradient:
        outputs = engine.commit()
    metrics = {name: metric.value.item() for name, metric in outputs["metrics"].items()}
    return Trained(mean_loss(outputs), gradient, all_weights(engine), metrics)


def by_verl(path: Path, case: str, loss_function: Any = None, **keys: Any) -> Trained:
    engine, batch = case_engine(path, case), case_batch(path, case)
    return step(engine, own_rows(rows_of(engine, batch, **keys)), loss_function)


def step(engine: DiffusersFSDPEngine, rows: TensorDict, loss_function: Any = None) -> Trained:
    """One optimizer step by verl."""
    with engine.train_mode(), stepped_gradients(engine) as gradient:
        outputs = engine.train_batch(rows, loss_function)
    engine.lr_scheduler_step()
    assert outputs["model_output"] == {}
    return Trained(mean_loss(outputs), gradient, all_weights(engine), outputs["metrics"])


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-7)
    assert_close(found.gradient, expected.gradient, 1e-5)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=0, atol=1e-6, msg=name)


def infer(engine: DiffusersFSDPEngine, rows: TensorDict) -> dict[str, Tensor]:
    with engine.eval_mode():
        return engine.infer_batch(rows)["model_output"]


# -- the TensorDict -----------------------------------------------------------------------------------------
def equal_rows(found: TrainingRows, expected: TrainingRows) -> bool:
    """True if all fields are bitwise the same."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return torch.equal(one, other)
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        if isinstance(one, list):
            return all(same(*pair) for pair in zip(one, other, strict=True))
        return one == other

    parts = [(vars(found) | vars(found.point)), (vars(expected) | vars(expected.point))]
    return all(name == "point" or same(value, parts[1][name]) for name, value in parts[0].items())


@pytest.mark.parametrize("case", ["flow_grpo", "diffusion_nft"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_rows_survive_what_verl_does_to_them(tiny_qwen_image: Path, one_rank: None, case: str, scale: float):
    engine = make_engine(tiny_qwen_image, **CASES[case])
    batch = make_batch(tiny_qwen_image, true_cfg_scale=scale)
    if case == "diffusion_nft":
        batch = case_batch(tiny_qwen_image, case)
    samples = replace(read_samples(batch), advantages=batch["advantages"])
    rows = make_rows(engine.points, samples, all_picks(samples))
    packed = pack_rows(rows)
    assert equal_rows(unpack_rows(packed), rows)
    for part in (packed[4:9], tu.chunk_tensordict(packed, 2)[1].to("cpu"), packed.split(5)[3]):
        first = int(torch.tensor([torch.equal(part["latents"][0], one) for one in rows.latents]).nonzero()[0])
        assert equal_rows(unpack_rows(part), rows_from(first, rows, len(part)))
    assert equal_rows(unpack_rows(torch.cat([packed[:7], packed[7:]])), rows)
    shuffled = list(tu.make_iterator(packed, 6, epochs=1, seed=3, dataloader_kwargs={"shuffle": True}))
    joined = unpack_rows(tu.concat_tensordict(shuffled))
    order = [next(n for n, one in enumerate(rows.latents) if torch.equal(one, mine)) for mine in joined.latents]
    assert sorted(order) == list(range(18)) != order
    for place, number in enumerate(order):
        assert equal_rows(rows_from(place, joined), rows_from(number, rows))


def test_a_missing_column_and_two_samplings_are_refused(tiny_qwen_image: Path, one_rank: None):
    engine = make_engine(tiny_qwen_image)
    rows = rows_of(engine, make_batch(tiny_qwen_image))
    with pytest.raises(ValueError, match="needs the columns next_latents for Transitions"):
        engine.infer_batch(rows.exclude("next_latents"))
    mixed = [SAMPLING, OTHER] * 9
    with pytest.raises(ValueError, match="must have one sampling"):
        unpack_rows(tu.assign_non_tensor(rows, sampling=mixed))


# -- training -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("case", "size"), [*((case, 4) for case in CASES), ("flow_grpo", None)])
def test_train_batch_is_a_logical_batch(tiny_qwen_image: Path, one_rank: None, case: str, size: int | None):
    expected = by_logical_batch(tiny_qwen_image, case)
    found = by_verl(tiny_qwen_image, case, micro_batch_size_per_gpu=size)
    assert_same(found, expected)
    start = all_weights(case_engine(tiny_qwen_image, case))
    old = [name for name in start if name.startswith("old ")]
    assert bool(old) == (case == "diffusion_nft")
    assert not old or any(not torch.equal(found.weights[name], start[name]) for name in old)
    shared = found.metrics.keys() & expected.metrics.keys() - {"grad_norm"}
    assert "policy_loss" in shared
    for name in shared:
        assert found.metrics[name] == [pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6)], name


def on_ranks(path: Path, folder: Path) -> Any:
    """Results of each case, with gradients reduced at the last tile, and of one with them reduced at every tile."""
    found: dict[str, Any] = {case: by_verl(path, case, micro_batch_size_per_gpu=3) for case in CASES}
    found["a caller's loss"] = by_verl(path, "flow_grpo", pull, micro_batch_size_per_gpu=3)
    engine = case_engine(path, "flow_grpo")
    engine.digen = replace(engine.digen, tsp=replace(engine.digen.tsp, reduce="tile"))
    rows = own_rows(rows_of(engine, case_batch(path, "flow_grpo"), micro_batch_size_per_gpu=3))
    found["log_probs"] = infer(engine, rows.copy())["log_probs"]
    found["reduced at every tile"] = step(engine, rows)
    try:
        infer(engine, rows if dist.get_rank() == 0 else tu.assign_non_tensor(rows, sampling=[OTHER] * len(rows)))
    except ValueError as error:
        found["another kind"] = str(error)
    found["logical batch"] = {case: by_logical_batch(path, case) for case in CASES}
    return found


@pytest.mark.long
def test_two_ranks_train_the_mean_over_both_their_rows(tiny_qwen_image: Path, one_rank: None, tmp_path: Path):
    found = on_two_ranks([on_ranks], tiny_qwen_image, tmp_path)["on_ranks"]
    for case in CASES:
        expected = by_logical_batch(tiny_qwen_image, case)
        assert_same(found[case], expected)
        assert_same(found[case], found["logical batch"][case])
    assert_same(found["reduced at every tile"], by_logical_batch(tiny_qwen_image, "flow_grpo"))
    assert_same(found["a caller's loss"], by_logical_batch(tiny_qwen_image, "flow_grpo"))
    assert "every rank needs rows of every network and sampling, got [1, 1] of 2 kinds" in found["another kind"]
    engine = case_engine(tiny_qwen_image, "flow_grpo")
    expected = torch.cat(log_probs(engine, case_batch(tiny_qwen_image, "flow_grpo")))[:11]
    torch.testing.assert_close(found["log_probs"], expected, rtol=0, atol=1e-6)


def test_padding_rows_with_mask_0_change_nothing(tiny_qwen_image: Path, one_rank: None):
    engine = case_engine(tiny_qwen_image, "flow_grpo")
    rows, num_padding = tu.pad_to_divisor(rows_of(engine, case_batch(tiny_qwen_image, "flow_grpo")), 5)
    assert num_padding == 2
    rows["mask"][-2:] = 0
    assert_same(step(engine, rows), by_logical_batch(tiny_qwen_image, "flow_grpo"))
    rows["mask"] = torch.zeros(20)
    with pytest.raises(ValueError, match="needs a row with mask 1"):
        engine.train_batch(rows, None)


@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_a_loss_scale_and_recomputed_blocks_change_nothing(tiny_qwen_image: Path, one_rank: None, scale: float | None):
    engine = make_engine(tiny_qwen_image, optim=PLAIN_STEPS, model={"recompute_blocks": 1})
    perturb(engine)
    engine.recomputation.fixed = None  # auto, as on an accelerator
    engine.state.loss_scale = None if scale is None else LossScale(scale)
    found = step(engine, rows_of(engine, case_batch(tiny_qwen_image, "flow_grpo")))
    assert_same(found, by_logical_batch(tiny_qwen_image, "flow_grpo"))
    assert engine.recomputation.share == 1.0


def test_mini_batches_of_verl_s_iterator_train_one_after_the_other(tiny_qwen_image: Path, one_rank: None):
    engine, other = (case_engine(tiny_qwen_image, "flow_grpo_with_kl") for _ in range(2))
    batch = case_batch(tiny_qwen_image, "flow_grpo")
    rows = rows_of(engine, batch)
    rows["old_log_probs"] = infer(engine, rows)["log_probs"]
    batch["old_log_probs"] = torch.stack(log_probs(other, batch))
    ratios = []
    for mini_batch in tu.make_iterator(rows, 9, epochs=2):
        ratios.append(step(engine, mini_batch).metrics["ratio_deviation_max"][0])
    for _ in range(2):
        for half in ([0, 1, 2], [3, 4, 5]):
            add_all(other, tu.index_select_tensor_dict(batch, half))
            other.commit()
    assert ratios[0] < 1e-5 < min(ratios[1:])  # the first step's weights are those of the old log-probs
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(engine)[name], value, rtol=0, atol=2e-6)


# -- a caller's loss ----------------------------------------------------------------------------------------
def pull(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """FlowGRPO of the first pass, as a verl loss."""
    assert dp_group is not None
    ratio = (model_output["log_probs"] - model_output["log_probs"].detach()).exp()
    total = -(data["advantages"] * ratio * data["mask"]).sum()
    loss = total / tu.get(data, "batch_num_tokens") * tu.get(data, "dp_size")
    return loss, {"rows": int(data["mask"].sum())}


def test_a_caller_s_loss_function_is_the_loss(tiny_qwen_image: Path, one_rank: None):
    found = by_verl(tiny_qwen_image, "flow_grpo_with_kl", pull, micro_batch_size_per_gpu=4)
    assert_same(found, by_logical_batch(tiny_qwen_image, "flow_grpo"))
    assert found.metrics["rows"] == [3, 4, 3, 4, 4]


def test_an_exception_discards_the_gradient(tiny_qwen_image: Path, one_rank: None):
    engine = case_engine(tiny_qwen_image, "flow_grpo")
    rows = rows_of(engine, case_batch(tiny_qwen_image, "flow_grpo"), micro_batch_size_per_gpu=4)
    calls = []

    def breaks(gradient: Tensor) -> None:
        raise KeyError("backward")

    def fails(**given: Any) -> tuple[Tensor, dict[str, Any]]:
        calls.append(given)
        if len(calls) == 3:
            given["model_output"]["velocity"].register_hook(breaks)
        return pull(**given)

    with pytest.raises(KeyError, match="backward"):
        engine.train_batch(rows, fails)
    assert not peek(engine)
    assert_same(step(engine, rows), by_logical_batch(tiny_qwen_image, "flow_grpo"))


# -- inference ----------------------------------------------------------------------------------------------
def test_infer_batch_gives_the_log_probs_of_evaluate_and_the_step_s_mean(tiny_qwen_image: Path, one_rank: None):
    engine, batch = case_engine(tiny_qwen_image, "flow_grpo"), make_batch(tiny_qwen_image)
    rows = rows_of(engine, batch, micro_batch_size_per_gpu=4)
    shuffled = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    found = infer(engine, tu.index_select_tensor_dict(rows, shuffled))
    assert {name: len(value) for name, value in found.items()} == dict.fromkeys(
        ("velocity", "log_probs", "latent_sample_means", "std"), 18
    )
    expected = torch.cat(log_probs(engine, batch))[shuffled]
    torch.testing.assert_close(found["log_probs"], expected, rtol=0, atol=1e-6)
    density = torch.distributions.Normal(found["latent_sample_means"], found["std"].reshape(-1, 1, 1))
    taken = density.log_prob(rows["next_latents"][shuffled]).flatten(1).mean(1)
    torch.testing.assert_close(taken, expected, rtol=0, atol=1e-5)
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("case", ["flow_grpo_with_kl", "flow_grpo_with_kl_and_lora"])
def test_another_policy_is_evaluated_by_name(tiny_qwen_image: Path, one_rank: None, case: str):
    engine, batch = case_engine(tiny_qwen_image, case), make_batch(tiny_qwen_image)
    found = infer(engine, rows_of(engine, batch, policy="reference"))["log_probs"]
    torch.testing.assert_close(found, batch["log_probs"].flatten(), rtol=0, atol=2e-6)  # the checkpoint's
    current = infer(engine, rows_of(engine, batch))["log_probs"]
    assert (current - found).abs().max() > 1e-4
    assert torch.equal(infer(engine, rows_of(engine, batch, policy="old"))["log_probs"], current)
    with pytest.raises(ValueError, match="policy=teacher has no weights"):
        infer(engine, rows_of(engine, batch, policy="teacher"))
    with pytest.raises(ValueError, match="only policy=current has a loss"):
        engine.train_batch(rows_of(engine, batch, policy="reference"), None)


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_the_reference_of_a_given_adapter_is_the_policy_that_the_run_began_with(
    tiny_qwen_image: Path, one_rank: None, coef: float
):
    model = {"lora_adapter_path": teacher_folder(tiny_qwen_image)}
    engine, batch = make_engine(tiny_qwen_image, digen={"kl": {"coef": coef}}, model=model), make_batch(tiny_qwen_image)
    begun = infer(engine, rows_of(engine, batch))["velocity"]
    perturb(engine)
    assert (infer(engine, rows_of(engine, batch))["velocity"] - begun).abs().max() > 1e-3
    if coef:
        assert torch.equal(infer(engine, rows_of(engine, batch, policy="reference"))["velocity"], begun)
        return
    with pytest.raises(ValueError, match="policy=reference has no weights"):
        infer(engine, rows_of(engine, batch, policy="reference"))


def test_old_weights_last_until_the_batch_ends(tiny_qwen_image: Path, one_rank: None):
    engine, batch = case_engine(tiny_qwen_image, "flow_grpo"), make_batch(tiny_qwen_image)
    before = infer(engine, rows_of(engine, batch))["log_probs"]
    engine.keep_old()
    with engine.train_mode():
        engine.train_batch(rows_of(engine, batch), None)
    after, old = (infer(engine, rows_of(engine, batch, policy=name))["log_probs"] for name in ("current", "old"))
    assert torch.equal(old, before) and not torch.equal(after, before)
    engine.lr_scheduler_step()
    assert torch.equal(infer(engine, rows_of(engine, batch, policy="old"))["log_probs"], after)


def test_rows_of_two_samplings_run_in_tiles_of_their_own(tiny_qwen_image: Path, one_rank: None):
    engine, batch = case_engine(tiny_qwen_image, "flow_grpo"), make_batch(tiny_qwen_image)
    rows = rows_of(engine, batch)
    first = infer(engine, rows.copy())["log_probs"]
    second = infer(engine, tu.assign_non_tensor(rows.copy(), sampling=[OTHER] * 18))["log_probs"]
    mixed = infer(engine, tu.assign_non_tensor(rows.copy(), sampling=[SAMPLING, OTHER] * 9))["log_probs"]
    expected = torch.where(torch.arange(18) % 2 == 0, first, second)
    torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
    engine.model.takes_masks = False  # so have texts of each length
    torch.testing.assert_close(infer(engine, rows.copy())["log_probs"], first, rtol=1e-6, atol=1e-6)


def test_forward_points_give_velocities_and_the_own_loss_without_gradient(tiny_qwen_image: Path, one_rank: None):
    engine = case_engine(tiny_qwen_image, "diffusion_nft")
    rows = rows_of(engine, case_batch(tiny_qwen_image, "diffusion_nft"), micro_batch_size_per_gpu=5)
    with engine.eval_mode():
        outputs = engine.infer_batch(rows, own_objective)
    assert outputs["model_output"].keys() == {"velocity"}
    assert outputs["model_output"]["velocity"].shape == rows["clean"].shape
    assert mean_loss(outputs) == pytest.approx(by_logical_batch(tiny_qwen_image, "diffusion_nft").loss, rel=1e-6)
    assert not peek(engine)


def test_a_tile_alone_is_a_batch(tiny_qwen_image: Path, one_rank: None):
    engine = case_engine(tiny_qwen_image, "flow_grpo_with_kl")
    rows = rows_of(engine, case_batch(tiny_qwen_image, "flow_grpo"))
    assert not engine.forward_step(rows, own_objective, forward_only=True)[0].requires_grad
    loss, output = engine.forward_step(rows, None, forward_only=False)
    assert loss.requires_grad and not output["loss"].requires_grad
    assert not any(value.requires_grad for value in output["model_output"].values())
    assert loss.item() == pytest.approx(by_logical_batch(tiny_qwen_image, "flow_grpo_with_kl").loss, rel=1e-6)


# -- what is refused ----------------------------------------------------------------------------------------
def test_an_open_logical_batch_is_refused_and_stays(tiny_qwen_image: Path, one_rank: None):
    engine = make_engine(tiny_qwen_image, digen={"advantage": {"scale": "group"}, "tsp": {"reduce": "tile"}})
    batch = make_batch(tiny_qwen_image)
    rows = rows_of(engine, batch)
    groups = begin_batch(engine, batch, [0.0, 1.0, 2.0, 5.0, 1.0, 0.0])
    engine.accumulate(fragment(groups, "g0"))
    before = {key: value.clone() for key, value in peek(engine).items()}
    for call in (engine.train_batch, engine.infer_batch, engine.forward_backward_batch):
        with pytest.raises(RuntimeError, match="needs the logical batch before it closed, but one is open"):
            call(rows, None)
    assert before and are_equal(peek(engine), before)
    engine.abort()
    engine.infer_batch(rows)


def test_an_objective_of_whole_groups_is_refused(tiny_qwen_image: Path, one_rank: None):
    engine = make_engine(tiny_qwen_image, digen={"loss": {"name": "gspo"}})
    rows = rows_of(engine, make_batch(tiny_qwen_image))
    with pytest.raises(ValueError, match=r"digen\.loss\.name=gspo reads whole groups"):
        engine.train_batch(rows, None)
    assert len(infer(engine, rows)["log_probs"]) == 18
    with pytest.raises(RuntimeError, match="own_objective names the run's loss"):
        own_objective(model_output={}, data=rows, dp_group=None)
