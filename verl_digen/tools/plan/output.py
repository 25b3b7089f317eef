# SPDX-License-Identifier: Apache-2.0
"""A plan: made of the words of a command line, as a table with a verdict, and as JSON."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_digen.models.published import checkpoint_folder
from verl_digen.preflight.rules import check_plannable, check_plannable_model
from verl_digen.tools.plan.compose import Mfu, Words, compose_run, device_of, mfu_of, platform_of, split_words
from verl_digen.tools.plan.host import Items, checkpoint_bytes, step_traffic
from verl_digen.tools.plan.memory import Memory, Phase, plan_memory
from verl_digen.tools.plan.remedies import Remedy, find_remedies
from verl_digen.tools.plan.run import Job, read_run
from verl_digen.tools.plan.split import SplitPlan, StepTime, generation_steps, plan_split, plan_time, split_lines
from verl_digen.tools.simulate.splits import POOL_KEYS


@dataclass(frozen=True)
class Plan:
    """All results of the plan."""

    run: Job
    memory: Memory
    time: StepTime
    device: str | None
    device_bytes: int | None
    mfu: Mfu
    """Measured or assumed."""
    words: Words
    remedies: list[Remedy]
    split: SplitPlan | None
    """None: the type of device is not known, or its generation is not timed."""
    split_words: str
    """Words for `split.best`, if it is proposed; or why a run would refuse it."""

    @property
    def host_fits(self) -> bool | None:
        """True if the node's host memory suffices; None if it is not known."""
        return None if self.words.host_bytes is None else self.memory.host_bytes <= self.words.host_bytes


def make_plan(words: Sequence[str]) -> Plan:
    """Plan the run that these words would start. ValueError if a config, checkpoint or setting cannot be planned."""
    own, overrides = split_words(words)

    def read(*more: str) -> Job:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl warns about every engine whose library is missing
            config = check_words([*overrides, *more], own)
            with checkpoint_folder(config.actor_rollout_ref.model.path) as folder:
                check_plannable_model(config, folder)
            return read_run(config, own.prompt_tokens)

    planned = read()
    device, device_bytes = device_of(own)
    memory = plan_memory(planned, device_bytes)
    types = own.types or (None if device is None else (device, device))
    found = mfu_of(planned.measured.title.rpartition(", ")[2], planned.measured.counts.num_weights)
    mfu = found if own.mfu is None else Mfu(own.mfu, own.mfu)
    split = None if types is None else plan_split(planned, types, device_bytes, mfu, own.reward_s)
    return Plan(
        run=planned,
        memory=memory,
        time=plan_time(planned, device, mfu, memory.recomputed_share, types and types[1], memory.training.num_rows),
        device=device,
        device_bytes=device_bytes,
        mfu=mfu,
        words=own,
        remedies=[] if device_bytes is None else find_remedies(planned, device_bytes, read),
        split=split,
        split_words=split_words_of(split, overrides, own) if split is not None and split.is_proposed else "",
    )


def check_words(overrides: Sequence[str], own: Words) -> Any:
    """Compose the config of these overrides and check it, as a run would before Ray starts. Raises ValueError."""
    config = compose_run(overrides, own)
    with platform_of(own):
        check_plannable(config)
    return config


def split_words_of(split: SplitPlan, overrides: Sequence[str], own: Words) -> str:
    """Words to type for the proposed split, in place of `gpus`; or why a run would refuse them."""
    words = list(split.overrides)
    kept = [word for word in overrides if word.partition("=")[0].lstrip("+") not in POOL_KEYS]
    if split.given is None:
        recipes = [word for word in kept if word.startswith("recipe=")]
        kept = [word for word in kept if word not in recipes]
        named = [recipes[-1].removeprefix("recipe=").strip("[]").replace(",", "+")] if recipes else []
        words.insert(0, f"recipe={'+'.join([*named, 'disaggregated'])}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_words([*kept, *words], replace(own, gpus=None, pools=None, device=own.types and own.types[0]))
    except ValueError as error:
        return f"which a run would refuse as it is: {error}"
    return " ".join(words)


SHOWN_STEPS = 100
"""Steps whose hours are shown where a run has as many as its epochs."""
ENCODING = "the same device, when it encodes prompts: the transformer waits on the host"


# -- for people -------------------------------------------------------------------------------------------------
def to_text(plan: Plan) -> str:
    """The plan as a table and a verdict."""
    settings, measured, memory = plan.run.settings, plan.run.measured, plan.memory
    counts, digen, sampling = measured.counts, settings.digen, settings.digen.sampling
    size = f"{sampling.height_px}x{sampling.width_px}"
    size += f"x{sampling.num_frames}" if sampling.num_frames > 1 else ""
    experts = f" in {measured.num_experts} experts" if measured.num_experts > 1 else ""
    guided, is_episode = ", guided" if settings.is_guided else "", digen.environment.is_on
    turns = f"at most {settings.num_turns} turns x " if is_episode else ""
    taken = generation_steps(settings)
    evaluated = f" ({taken:.3g} evaluated on average)" if taken != digen.num_generation_steps else ""
    is_choice = settings.num_trained_samples < settings.num_samples
    chosen = f" of {settings.num_trained_samples // settings.num_prompts} samples" if is_choice else ""
    lines = [
        f"{measured.title}: {counts.num_weights / 1e9:.2f} B parameters{experts}, "
        f"{counts.num_trained / 1e9:.3f} B trained",
        f"{size}, {sampling.num_steps} steps{evaluated}{guided}; "
        f"{settings.num_prompts} prompts x {settings.group_size} samples x "
        f"{turns}{measured.rows_per_group / settings.group_size:g} trained steps{chosen}; {_pools(plan)}",
        "",
        *_phase("a device that trains", memory.training),
        f"  backward recomputes {memory.num_recomputed} of {memory.num_blocks} blocks",
        "",
        *_phase("a device that generates", memory.generating),
        "the same device, when it decodes",
        *_rows(memory.decoding, "decoding"),
        *([] if memory.encoding is None else _phase(ENCODING, memory.encoding)),
        "",
        "host memory of a node",
        *_items(memory.host),
        _line("together", memory.host_bytes),
        "in a step",
        *_items(step_traffic(plan.run)),
        _line(f"of it one {'turn' if is_episode else 'sample'}'s trajectory", measured.trajectory_bytes),
        _line(f"of it one {'turn' if is_episode else 'prompt'}'s condition", measured.condition_bytes),
        "on disk",
        _line("a checkpoint", checkpoint_bytes(plan.run)),
        "",
        *_seconds(plan),
        *([] if plan.split is None else split_lines(plan.split, plan.split_words)),
        "",
        *_verdict(plan),
        _host_verdict(plan),
        *_timeshared(plan),
    ]
    return "\n".join(lines)


def _pools(plan: Plan) -> str:
    settings = plan.run.settings
    device = plan.device or "device"
    if settings.is_split:
        other = f"{plan.words.types[1]} " if plan.words.types is not None and plan.words.types[1] != device else ""
        return f"{settings.num_trainer_devices} {device} train, {settings.num_generator_devices} {other}generate"
    return f"{settings.num_trainer_devices} {device} do both"


def _phase(title: str, phase: Phase) -> list[str]:
    return [title, *_items(phase.items), *_rows(phase, "activations")]


def _rows(phase: Phase, what: str) -> list[str]:
    rows = f"{what}, {phase.num_rows} {phase.rows_name} x {_gb(phase.row_bytes).strip()}"
    own = [_line(rows, phase.row_bytes * phase.num_rows)] if phase.row_bytes else []
    return [*own, _line("together", phase.total)]


def _items(items: Items) -> list[str]:
    return [_line(name, size) for name, size in items.items()]


def _line(name: str, size: int) -> str:
    return f"  {name:<58} {_gb(size)}"


def _gb(size: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:>8.2f} {unit}"
    return f"{size / 1e3:>8.2f} kB"


def _seconds(plan: Plan) -> list[str]:
    time = plan.time
    work = (
        f"{time.generating_flops / 1e15:.3g} PFLOP to generate, {time.training_flops / 1e15:.3g} to train "
        "(a step; without encoding, decoding, rewards)"
    )
    if plan.device is None or time.generating_s is None or time.training_s is None or time.step_s is None:
        return [work, "no seconds: the peak of this device is not known; device=H100 plans for one"]
    shares = dict.fromkeys(f"{share:.0%}" for share in (plan.mfu.generating, plan.mfu.training))
    num_steps, num_devices = plan.run.settings.num_steps or SHOWN_STEPS, plan.run.settings.num_devices
    hours = time.step_s * num_steps / 3600
    shown = f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min"
    return [
        work,
        f"calculated, not measured: {time.generating_s:.1f} s to generate, {time.training_s:.1f} s to train, a step in "
        f"{time.step_s:.1f} s or more, at {' and '.join(shares)} of the peak of "
        f"{' and '.join(dict.fromkeys(plan.words.types or (plan.device,)))}",
        f"{num_steps} steps in {shown} or more, {hours * num_devices:.3g} GPU-hours",
    ]


def _verdict(plan: Plan) -> list[str]:
    memory = plan.memory
    if memory.limit_bytes is None or plan.device_bytes is None:
        return ["no verdict: the device's memory is not known; gpu_mem=80 plans for 80 GB"]
    limit = f"{memory.limit_bytes / 1e9:.1f} of {plan.device_bytes / 1e9:.0f} GB"
    peak = memory.peak_bytes
    if memory.fits:
        return [f"FITS  {peak / 1e9:.1f} GB are needed (calculated), {limit} may be used"]
    lines = [f"DOES NOT FIT  {peak / 1e9:.1f} GB are needed (calculated), {limit} may be used"]
    lines += [
        f"  then {remedy.override}: {remedy.training_bytes / 1e9:.1f} GB to train, "
        f"{remedy.generating_bytes / 1e9:.1f} to generate{', fits' if remedy.fits else ''}"
        for remedy in plan.remedies
    ]
    if not plan.remedies or not plan.remedies[-1].fits:
        lines.append(f"  no setting makes it fit; {_way_out(memory)}")
    return lines


def _host_verdict(plan: Plan) -> str:
    needed = f"{plan.memory.host_bytes / 1e9:.1f} GB of host memory"
    if plan.words.host_bytes is None:
        return f"the fullest node needs {needed} (calculated); host_mem=1000 compares it with 1000 GB"
    given = f"{plan.words.host_bytes / 1e9:.0f} GB"
    if plan.host_fits:
        return f"FITS THE HOST  {needed} are needed on the fullest node (calculated), it has {given}"
    return (
        f"DOES NOT FIT THE HOST  {needed} are needed on the fullest node (calculated), it has {given}; use fewer "
        "devices per node, offload less (actor_rollout_ref.actor.fsdp_config.param_offload, optimizer_offload), or "
        "encode prompts before the run (digen.rollout.encoders=before)"
    )


def _timeshared(plan: Plan) -> list[str]:
    """Remark on rewards that take turns with the replicas, whose weights the plan does not know."""
    names = [entry.name for entry in plan.run.settings.digen.reward.timeshared]
    if not names or plan.run.settings.is_split:
        return []
    kept = plan.memory.generating.items["trainer that waits"] / 1e9
    return [
        f"NOT COUNTED  the weights of timeshared rewards ({', '.join(names)}): awake they need room beside the "
        f"{kept:.1f} GB that the trainer keeps; asleep they lie in host memory, once per device of the node"
    ]


def _way_out(memory: Memory) -> str:
    """Advice if no setting helps: smaller samples, unless the weights alone are too large."""
    assert memory.limit_bytes is not None
    weights = sum(memory.generating.items.values())
    if weights > memory.limit_bytes:
        return (
            f"what a replica holds before it generates is {weights / 1e9:.1f} GB, so use devices with more memory, or "
            "recipe=...+vllm_omni with actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    return "lower digen.sampling.height_px, width_px or num_frames"


# -- for programs -----------------------------------------------------------------------------------------------
def to_json(plan: Plan) -> dict[str, Any]:
    """Every number of the plan; bytes, seconds, FLOPs."""
    settings, measured, memory = plan.run.settings, plan.run.measured, plan.memory
    return {
        "model": measured.title,
        "parameters": asdict(measured.counts),
        "parts": {name: part.num_params for name, part in measured.parts.items()},
        "num_trainer_devices": settings.num_trainer_devices,
        "num_generator_devices": settings.num_generator_devices,
        "is_split": settings.is_split,
        "device": plan.device,
        "device_bytes": plan.device_bytes,
        "activations": {
            "all_recomputed_bytes": measured.training.row_bytes(memory.num_blocks),
            "none_recomputed_bytes": measured.training.row_bytes(0),
            "inputs_bytes": sum(block.inputs for block in measured.training.blocks),
        },
        "num_blocks": memory.num_blocks,
        "num_recomputed": memory.num_recomputed,
        "training": _phase_json(memory.training),
        "generating": _phase_json(memory.generating),
        "decoding": _phase_json(memory.decoding),
        "encoding": memory.encoding and _phase_json(memory.encoding),
        "host": memory.host,
        "host_needed_bytes": memory.host_bytes,
        "host_bytes": plan.words.host_bytes,
        "host_fits": plan.host_fits,
        "step": step_traffic(plan.run),
        "is_base_whole": memory.is_base_whole,
        "trajectory_bytes": measured.trajectory_bytes,
        "condition_bytes": measured.condition_bytes,
        "rows_per_sample": plan.run.rows_per_sample,
        "checkpoint_bytes": checkpoint_bytes(plan.run),
        "forward_flops": measured.flops.forward,
        "time": asdict(plan.time),
        "mfu": plan.mfu._asdict(),
        "limit_bytes": memory.limit_bytes,
        "fits": memory.fits,
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "split": _split_json(plan),
    }


def _split_json(plan: Plan) -> dict[str, Any] | None:
    split = plan.split
    return split and {
        "given": None if split.given is None else str(split.given),
        "given_s": split.given_s,
        "together": split.together,
        "together_s": split.together_s,
        "best": None if split.best is None else str(split.best.split),
        "best_s": split.best_s,
        "gain": split.gain,
        "words": plan.split_words,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {"items": phase.items, "row_bytes": phase.row_bytes, "num_rows": phase.num_rows, "total_bytes": phase.total}
