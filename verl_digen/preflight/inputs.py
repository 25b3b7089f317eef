# SPDX-License-Identifier: Apache-2.0
"""Rules for prompt files, for rewards of some prompts alone (`digen.reward.functions.NAME.data_sources`), and for
objectives whose samples are pairs of pictures of the data set (`offline_dpo`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.data.prompts import SURELY_SHORT_BYTES, Columns, PromptCheck, TooLong, find_too_long, read_prompts
from verl_digen.preflight.model import check_prompt_images, load_configs, model_of
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require, suggestion
from verl_digen.reward.named import check_rows, has_custom
from verl_digen.types import PromptRow


def check_prompts(run: StartConfig) -> None:
    """Require readable prompt files, enough prompts for one step, and none that the model does not read whole."""
    validating = validates(run.config)
    if OmegaConf.select(run.config, "data.train_files") is None:
        raise ValueError("data.train_files must name a file of prompts, got nothing; set data.train_files=FILE")
    if validating and OmegaConf.select(run.config, "data.val_files") is None:
        raise ValueError(
            f"data.val_files must name a file of prompts where a run validates ({', '.join(validating)}), got nothing; "
            "set data.val_files=FILE, or trainer.test_freq=-1 trainer.val_before_train=false"
        )
    train, val = prompts_of(run, "train"), prompts_of(run, "val")
    if has_checkpoint(run.config):
        check_prompt_images(run, load_configs(run.config.actor_rollout_ref.model.path), [*train.prompts, *val.prompts])
    check_sources(run, train.prompts, val.prompts)
    generated = [row for row in train.prompts if not row.pair]
    for prompts, is_validation in ((generated, False), (val.prompts, True)):
        check_rows(run.digen.reward, prompts, is_validation=is_validation)
    found = [*train.too_long, *val.too_long]
    if found and not run.config.data.filter_overlong_prompts:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0].prompt.place}{more}: {found[0].reason}, or set data.filter_overlong_prompts=true, which leaves "
            "such prompts out"
        )
    num_prompts, batch = len(train.prompts) - len(train.too_long), run.config.data.train_batch_size
    require(
        num_prompts >= batch,
        f"data.train_files must hold data.train_batch_size={batch} prompts or more{train.reduced}",
        num_prompts,
        f"{train.remedy}, or lower data.train_batch_size",
    )
    require(
        not validating or len(val.prompts) > len(val.too_long),
        f"data.val_files must hold a prompt{val.reduced}",
        0,
        val.remedy,
    )


def validates(config: DictConfig) -> list[str]:
    """Settings for which a run validates, as typed; empty if it does not."""
    trainer = config.trainer
    found = ["trainer.val_before_train=true"] if trainer.val_before_train else []
    return found + ([f"trainer.test_freq={trainer.test_freq}"] if trainer.test_freq > 0 else [])


def check_validation(run: StartConfig) -> None:
    """Require that a run with verl's `val_only` validates: it ends after the validation before training."""
    if run.config.trainer.val_only:
        remedy = "leave trainer.val_before_train out, or set trainer.val_only=false"
        row = "trainer.val_before_train", True, ", which would train otherwise", remedy
        run.require_values("with trainer.val_only=true", row)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of `data.train_files` or `data.val_files`, and the selection from them."""

    part: str
    num_read: int
    prompts: Sequence[PromptRow]
    """After `data.*_max_samples`."""
    too_long: Sequence[TooLong]
    """Prompts that are too long; left out of `prompts` where `data.filter_overlong_prompts` is true."""

    @property
    def is_cut(self) -> bool:
        """True if `data.*_max_samples` takes fewer than there are."""
        return len(self.prompts) < self.num_read

    @property
    def reduced(self) -> str:
        """Reasons why fewer prompts are taken than the files hold, for a message."""
        reasons = [f"data.{self.part}_max_samples={len(self.prompts)} of {self.num_read}"] if self.is_cut else []
        if self.too_long:
            reasons.append(f"data.filter_overlong_prompts=true leaves out {len(self.too_long)}")
        return f" ({', '.join(reasons)})" if reasons else ""

    @property
    def remedy(self) -> str:
        return f"raise data.{self.part}_max_samples" if self.is_cut else "add prompts"


def prompts_of(run: StartConfig, part: str) -> PromptSet:
    """The prompts of `data.PART_files`, PART being train or val. An empty set if a run does not validate and names
    none. Files are read once per run. Raises as `_read_prompts`."""
    if part not in run.prompts:
        run.prompts[part] = _read_prompts(run, part)
    return run.prompts[part]


def num_steps(run: StartConfig) -> int:
    """Steps of the whole run."""
    train = prompts_of(run, "train")
    per_epoch = (len(train.prompts) - len(train.too_long)) // run.config.data.train_batch_size
    return run.config.trainer.total_training_steps or run.config.trainer.total_epochs * per_epoch


def _read_prompts(run: StartConfig, part: str) -> PromptSet:
    """Read the prompts. Raises ValueError: a file is missing or malformed, or the run's negative prompt is wrong."""
    given, most = OmegaConf.select(run.config, f"data.{part}_files"), run.config.data[f"{part}_max_samples"]
    if given is None:
        return PromptSet(part, 0, (), ())
    files: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) or OmegaConf.is_dict(given) else given
    read = read_prompts(files, f"data.{part}_files", Columns.of(run.config.data))
    taken = read[:most] if most > 0 else read
    if not has_checkpoint(run.config):
        return PromptSet(part, len(read), taken, ())
    _check_negative(run)
    return PromptSet(part, len(read), taken, find_too_long(taken, lambda: _load_prompt_check(run.config)))


def _check_negative(run: StartConfig) -> None:
    negative = run.digen.sampling.negative_prompt
    if len(negative.encode()) > SURELY_SHORT_BYTES:
        try:
            _load_prompt_check(run.config)(negative)
        except ValueError as error:
            reason = str(error).rpartition("; ")[0]  # the remedy is for a prompt of a file
            raise ValueError(f"digen.sampling.negative_prompt: {reason}; shorten it") from error


def has_checkpoint(config: DictConfig) -> bool:
    """True if the checkpoint is on this machine. If not, encoding reports prompts that are too long."""
    section = config.actor_rollout_ref.model
    return not OmegaConf.is_missing(section, "path") and Path(section.path).expanduser().is_dir()


def _load_prompt_check(config: DictConfig) -> PromptCheck:
    return load_configs(config.actor_rollout_ref.model.path).load_prompt_check()


def check_sources(run: StartConfig, train: Sequence[PromptRow], val: Sequence[PromptRow]) -> None:
    """Require a trained reward for every prompt, a prompt for every source that an entry names, and for every gold
    reward a validation prompt. `val`: empty if the run does not validate."""
    reward = run.digen.reward
    routed = [entry for entry in reward.entries if entry.data_sources is not None]
    if not routed:
        return
    validated = sorted({prompt.data_source for prompt in val})
    sources = sorted({*validated, *(prompt.data_source for prompt in train)})
    for entry in routed:
        unknown = [source for source in entry.data_sources or () if source not in sources]
        require(
            not unknown,
            f"{entry.key}.data_sources must name a data_source of the prompts, which have {', '.join(sources)}",
            unknown,
            f"{suggestion(unknown[0], sources) if unknown else ''}take it out",
        )
        require(
            not entry.is_gold or not validated or any(entry.covers(source) for source in validated),
            f"{entry.key}.data_sources must name a data_source of the prompts of data.val_files, which have "
            f"{', '.join(validated)}",
            list(entry.data_sources or ()),
            "a gold reward is compared at validations; add one of them",
        )
    if has_custom(run.config) and reward.custom_weight != 0:
        return
    trained = [entry for entry in reward.entries if entry.weight != 0]
    uncovered = [source for source in sources if not any(entry.covers(source) for entry in trained)]
    require(
        not uncovered,
        "every data_source of the prompts must be scored by a reward whose weight is not 0",
        uncovered,
        "add it to digen.reward.functions.NAME.data_sources of a reward, or take its prompts out of the files",
    )


def check_pairs(run: StartConfig) -> None:
    """Require replicas that encode pictures, groups of a pair, a pair in every row, and rewards that have a use."""
    if not run.digen.trains_pairs:
        return
    loss = f"digen.loss.name={run.digen.loss_name}"
    run.refuse_values(
        f"with {loss}",
        ("actor_rollout_ref.rollout.name", "vllm_omni", ", whose pictures are encoded", "leave out recipe vllm_omni"),
        ("digen.reward.combine", "gdpo", ", whose pairs have no rewards to normalise", "leave it out"),
    )
    of_video = ", whose pairs are pictures; a video model trains on one frame"
    run.require_values(
        f"with {loss}",
        ("actor_rollout_ref.rollout.n", 2, ": the chosen and the rejected picture of a prompt", "set it to 2"),
        ("digen.sampling.num_frames", 1, of_video, "set it to 1"),
        ("digen.tag.policy", "off", ", which leaves trainer ranks nothing to generate", "leave it out"),
    )
    if (model := model_of(run.config)) is not None:
        require(
            not model.spec.audio_parts,
            f"actor_rollout_ref.model.path must hold a model that makes no sound with {loss}, whose pairs are "
            f"pictures, and {model.spec.title} makes sound",
            run.config.actor_rollout_ref.model.path,
            "choose another model, or an objective that trains on samples of its own",
        )
    _check_rows_of_pairs(run, loss)
    _check_rewards_of_pairs(run, loss)


def _check_rows_of_pairs(run: StartConfig, loss: str) -> None:
    """Require a pair in every row of `data.train_files`; `check_prompts` reports files that cannot be read."""
    prompts = prompts_of(run, "train").prompts
    bare = [prompt for prompt in prompts if not prompt.pair]
    if bare:
        raise ValueError(
            f"data.train_files: every row must have pictures in the columns chosen and rejected with {loss}, but "
            f"{bare[0].place} has none (as {len(bare)} of {len(prompts)} rows); give both, or take the rows without "
            "them out"
        )


def _check_rewards_of_pairs(run: StartConfig, loss: str) -> None:
    given = [entry.name for entry in run.digen.reward.entries]
    given += ["reward.custom_reward_function.path"] if has_custom(run.config) else []
    require(
        not given or bool(validates(run.config)),
        f"digen.reward.functions must be empty with {loss} where the run does not validate: pairs are not scored, so "
        "none would be called",
        given,
        "set digen.reward.functions={}, or validate with trainer.test_freq=20",
    )
