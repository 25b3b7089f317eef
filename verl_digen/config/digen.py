# SPDX-License-Identifier: Apache-2.0
"""`DigenConfig`: everything under `digen:`, and the rules that span its sections."""

from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Annotated, Any

from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.kl import LAWS as KL_LAWS
from verl_digen.algorithms.objectives import (
    Denominator,
    LossConfig,
    Select,
    all_samples,
    best_and_worst,
    choose_denominator,
    find_objective,
)
from verl_digen.algorithms.outside import EXACT, check_outside
from verl_digen.algorithms.solvers import DETERMINISTIC, FIRST_ORDER
from verl_digen.algorithms.tree import BranchesConfig
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config.reward import MAX_RETRIES, MAX_WORKERS, RewardConfig, require_devices
from verl_digen.config.rollout import RolloutConfig
from verl_digen.config.sampling import (
    LOSS_DEFAULTS,
    AdvantageConfig,
    EmaConfig,
    KlConfig,
    SamplingConfig,
    SdeConfig,
    check_loss_section,
    loss_settings,
)
from verl_digen.hardware.attention import ATTENTION_BACKENDS, NATIVE
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.require import In, OneOf, Section, check_fields, number, require, require_value
from verl_digen.schedulers.rules import GapConfig, QueueConfig, StalenessConfig, TagConfig

MAX_TURNS = 1000
"""More turns than an episode of pictures has. Catches typos."""
MAX_CONCURRENT = 1_000_000
"""More calls than a process has at the same time. Catches typos."""


@dataclass(frozen=True)
class EnvironmentConfig(Section, key="digen.environment"):
    """The environment of multi-turn samples (episodes), see `verl_digen.environments`."""

    name: str | None = None
    """Built-in environment. If `name` and `path` are null, samples are single pictures."""
    path: str | None = None
    """Your own environment: FILE.py:NAME, or package.module.NAME, on every node."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment's class, by name."""
    max_turns: Annotated[int, In(f"[1, {MAX_TURNS}]")] = 4
    """Maximum pictures of an episode. An episode that reaches it ends, trains, and counts in `episodes/exceeded`."""
    num_workers: Annotated[int, In(f"[1, {MAX_WORKERS}]")] = 1
    """Processes of environments."""
    num_gpus: Annotated[float, In("[0, inf)")] = 0.0
    """Devices per process: 0 is the CPU, 0.5 half a device."""
    concurrent: Annotated[int, In(f"[1, {MAX_CONCURRENT}]")] = 256
    """Maximum concurrent calls per process."""
    step_timeout_s: Annotated[float, In("(0, inf]")] = 60.0
    """Timeout of a call of `reset` or `step`."""
    max_retries: Annotated[int, In(f"[0, {MAX_RETRIES}]")] = 2
    """Restarts of an episode's environment after an exception, a timeout or a dead process; then the episode fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            why = "with digen.environment.path, which names an environment too"
            require_value("digen.environment.name", self.name, None, why, "leave one of them out")
        require_devices("digen.environment.num_gpus", self.num_gpus)

    @property
    def is_on(self) -> bool:
        """True if samples are episodes."""
        return self.target is not None

    @property
    def target(self) -> str | None:
        """The environment as named, or None."""
        return self.name if self.path is None else self.path

    @property
    def key(self) -> str:
        """The key that names it, as typed."""
        return "digen.environment.name" if self.path is None else "digen.environment.path"


REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class TspConfig(Section, key="digen.tsp"):
    """Time-step parallelism: assignment of rows to ranks and tiles, and reduction of gradients."""

    enable: bool = True
    """False: ranks get samples instead of rows, and a tile has one timestep of each of its samples."""
    samples_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Samples of one forward and backward on a rank. auto: as many as fit into memory."""
    steps_per_tile: Annotated[int | str, In("[1, inf]", "auto"), "memory decides; auto measures it"] = "auto"
    """Timesteps of each sample in one forward and backward. auto: as many as fit into memory. If both are auto, a tile
    takes rows in order, of any samples and timesteps."""
    reduce: Annotated[str, OneOf(REDUCE)] = "auto"
    """When gradients are summed over the ranks: per tile, fragment or (logical) batch. Later saves communication but
    costs memory: each rank keeps the unsharded gradient. auto: batch with LoRA or if memory allows, else tile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.enable or self.steps_per_tile in ("auto", 1),
            "digen.tsp.steps_per_tile must be auto or 1 with digen.tsp.enable=false, where timesteps are not batched",
            self.steps_per_tile,
            "set digen.tsp.enable=true",
        )

    @property
    def extents(self) -> tuple[int | None, int | None]:
        """(samples, steps) of a tile; None where it is automatic."""
        return number(self.samples_per_tile), number(self.steps_per_tile) if self.enable else 1


@dataclass(frozen=True)
class PlacementConfig:
    """Device types of the pools in a mixed cluster: Ray's names, such as H100, or custom resources (`ray start
    --resources='{"NAME": 1}'`). null: any device. Name a type for each pool, or for none."""

    trainer_accelerator: str | None = None
    """Type of the `trainer.nnodes` x `trainer.n_gpus_per_node` devices."""
    generator_accelerator: str | None = None
    """Type of the `actor_rollout_ref.rollout.nnodes` x `n_gpus_per_node` devices (`recipe=...+disaggregated`)."""
    reward_accelerator: str | None = None
    """Type of the nodes of all reward and environment workers: verl's `reward.num_workers`, and `num_workers` of each
    reward in `digen.reward.functions`."""


MAX_SEED = 2**63
"""PyTorch's generators take seeds of 64 bits."""


@dataclass(frozen=True)
class DigenConfig:
    """Everything under `digen:`."""

    seed: Annotated[int, In(f"[{-MAX_SEED}, {MAX_SEED})"), "any small number does"] = 42
    """Seed of noise, windows and prompt order."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sde: SdeConfig = field(default_factory=SdeConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    branches: BranchesConfig = field(default_factory=BranchesConfig)
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: dict[str, Any] = field(default_factory=lambda: dict(LOSS_DEFAULTS))
    """`name` of the policy loss, `old_log_probs`, and the loss's own settings; see `verl_digen.config.sampling`."""
    kl: KlConfig = field(default_factory=KlConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tsp: TspConfig = field(default_factory=TspConfig)
    tag: TagConfig = field(default_factory=TagConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    """Timeouts of everything the run waits for, see `verl_digen.processes.deadlines`."""
    attention_backend: Annotated[str, OneOf(sorted(ATTENTION_BACKENDS))] = NATIVE
    """Attention kernel of trainer and replicas, by diffusers' name (`verl_digen.hardware.attention`): native is
    PyTorch's choice, flash is flash-attn, _flash_3_hub FlashAttention 3."""
    compile: bool = False
    """Compile the repeated blocks of trainer and replicas with `torch.compile` (inductor). The first calls of each kind
    take seconds to minutes longer."""
    max_refills_per_step: Annotated[int | None, In("[0, inf]"), "null means as many as the batch has prompts"] = None
    """Maximum groups replaced per step because a sample failed; 0: none. null: the number of prompts in a batch."""
    num_logged_images: Annotated[int, In("[0, inf]"), "0 logs none"] = 16
    """Validation prompts shown in the picture grids."""
    num_logged_groups: Annotated[int, In("[0, inf]"), "0 logs none"] = 4
    """Training groups whose best and worst samples are shown every `logged_groups_every` steps; 0: none, and no
    distributions of rewards."""
    logged_groups_every: Annotated[int, In("[1, inf]"), "digen.num_logged_groups=0 shows none"] = 10
    """Steps between two logs of training groups."""
    report: bool = True
    """Write `report.html` about once a minute, in a separate process. `digen report RUN` writes it too."""

    def __post_init__(self) -> None:
        check_fields(self, "digen.")
        object.__setattr__(self, "loss", LOSS_DEFAULTS | self.loss)
        check_loss_section(self.loss)
        if self.staleness.max_versions > 0:
            why = "with digen.staleness.max_versions > 0, where replicas generate the next batch during a validation"
            remedy = "set digen.ema.validate=false, or digen.staleness.max_versions=0"
            require_value("digen.ema.validate", self.ema.validate, False, why, remedy)
        if self.reward.combine == "gdpo":
            why = ", where a group with equal sums of rewards trains if one of them differs"
            key, given = "digen.queue.drop_zero_spread", self.queue.drop_zero_spread
            require_value(key, given, False, f"with digen.reward.combine=gdpo{why}", "leave it out")
        self._check_points()

    @property
    def rollout_attention_backend(self) -> str:
        """Attention kernel of the replicas: theirs, else the trainer's."""
        return self.rollout.attention_backend or self.attention_backend

    @property
    def rollout_compiles(self) -> bool:
        """True if replicas compile blocks: by their own key, else by the trainer's."""
        return self.compile if self.rollout.compile is None else self.rollout.compile

    def _check_points(self) -> None:
        """Require points that the schedule has, samples that differ, one choice of them, and a defined KL term."""
        loss = f"with digen.loss.name={self.loss_name}"
        if find_objective(self.loss_name).select is not all_samples:
            why = f"{loss}, which chooses samples itself"
            require_value("digen.advantage.best_of", self.advantage.best_of, None, why, "leave it out")
        require(
            not self.branches.splits
            or (not self.trains_forward_points and find_objective(self.loss_name).joint is None),
            f"digen.branches.splits must be [] {loss}, whose rows "
            f"{'are no steps of an SDE' if self.trains_forward_points else 'compare all steps of one sample'}",
            list(self.branches.splits),
            "leave it out, or choose a loss of single steps such as flow_grpo",
        )
        if not self.trains_forward_points:
            self.window.validate_for(self.sampling.num_steps)
            self.branches.validate_for(
                self.window, self.sampling.num_steps, shares_noise=self.sampling.shared_initial_noise
            )
            self._check_ode_steps()
            self._check_law()
            return
        require(
            self.sampling.outside == EXACT,
            f"digen.sampling.outside must be left out {loss}, which trains finished pictures and has no window: a "
            "cheap picture would be what it learns",
            self.sampling.outside,
            "sample with fewer steps of digen.sampling.solver=dpm2",
        )
        shared, why = self.sampling.shared_initial_noise, f"{loss}, whose samples differ by their initial noise"
        require_value("digen.sampling.shared_initial_noise", shared, False, why, "set it to false")
        self.forward.count(self.sampling.num_steps)
        if self.kl.coef != 0:
            why = f"{loss}, whose rows are no steps of an SDE"
            require_value("digen.kl.kind", self.kl.kind, "velocity", why, "set it, or digen.kl.coef=0")

    def _check_law(self) -> None:
        """Require a law of the stochastic steps that the loss and the KL term are defined for."""
        of_kl = KL_LAWS.get(self.kl.kind, ()) if self.kl.coef > 0 else ()
        for key, value, laws in (
            ("digen.loss.name", self.loss_name, find_objective(self.loss_name).laws),
            ("digen.kl.kind", self.kl.kind, of_kl),
        ):
            require(
                not laws or self.sde.law in laws,
                f"digen.sde.law must be {' or '.join(laws)} with {key}={value}",
                self.sde.law,
                f"choose that law, or another {key}",
            )

    def _check_ode_steps(self) -> None:
        """Require a solver of recorded paths, with steps outside the window where it, or `outside`, needs some."""
        require(
            self.sampling.solver in DETERMINISTIC,
            f"digen.sampling.solver must be one of {', '.join(DETERMINISTIC)} with "
            f"digen.loss.name={self.loss_name}, which trains recorded steps: the noise of sa has no log-prob",
            self.sampling.solver,
            "choose another; the noise of recorded steps is digen.sde.noise_level",
        )
        require(
            self.sampling.solver in FIRST_ORDER or self.window.kind == "consecutive",
            f"digen.sampling.solver must be euler with digen.window.kind={self.window.kind}, where every step but "
            "the last is stochastic",
            self.sampling.solver,
            "set digen.window.kind=consecutive, or leave it out; digen.sampling.val_solver is for validation",
        )
        check_outside(self.sampling.outside, self.window, self.sampling.num_steps)
        if self.sampling.solver not in FIRST_ORDER:
            of_solver = f"with digen.sampling.solver={self.sampling.solver}"
            why = f"{of_solver}, which reads the predictions of steps that the cache skips"
            remedy = "set digen.sampling.solver=euler, or pass over steps with digen.sampling.outside.solver_after"
            require_value("digen.sampling.outside.cache", self.sampling.outside.cache, 0, why, remedy)

    def most_group_refills(self, num_prompts: int) -> int:
        """`max_refills_per_step`, or `num_prompts` where it is null."""
        return num_prompts if self.max_refills_per_step is None else self.max_refills_per_step

    @property
    def slots_per_replica(self) -> int:
        """`gap.slots_per_replica`, or what auto stands for."""
        return number(self.gap.slots_per_replica) or (1 if self.environment.is_on or self.tag.policy != "off" else 2)

    @property
    def loss_name(self) -> str:
        return self.loss["name"]

    @property
    def trains_forward_points(self) -> bool:
        """True if finished pictures are noised again for training, and no path is recorded."""
        return find_objective(self.loss_name).points == "forward"

    @property
    def trains_pairs(self) -> bool:
        """True if the samples that train are pairs of pictures of the data set."""
        return find_objective(self.loss_name).source == "dataset"

    @property
    def num_generation_steps(self) -> int:
        """Denoising steps of a training sample: none for a picture of the data set."""
        return 0 if self.trains_pairs else self.sampling.num_steps

    @property
    def select(self) -> Select:
        """Choice of the samples of a group that train: by `advantage.best_of`, else the objective's."""
        count = self.advantage.best_of
        return find_objective(self.loss_name).select if count is None else partial(best_and_worst, count=count)

    @cached_property
    def loss_settings(self) -> LossConfig:
        """Settings of the policy loss, of its own class."""
        return loss_settings(self.loss)

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without `loss_settings`, whose class another process may not have registered yet."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def denominator(self) -> Denominator:
        """Source of `old_log_prob`, from the loss, `old_log_probs` and the staleness of samples, see
        `verl_digen.algorithms.objectives.denominator`. ValueError if the three do not go together."""
        given, most = self.loss["old_log_probs"], self.staleness.max_versions
        return choose_denominator(self.loss_name, self.loss_settings, given, most)
