# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model` for a diffusion model; takes the place of verl's `HFModelConfig`, and carries the `digen:`
section to the engine and the replicas.

verl builds it in every process that needs the model: trainer ranks, replicas, agent loop. So building it reads JSON
files at most; only reading `local_path` fetches weights.

Invariant: after construction `lora_rank` and `lora_alpha` are the only source of LoRA's size, whichever of verl's two
spellings (`lora_rank`, `lora.rank`) or an adapter's own config it came from.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING, DictConfig, OmegaConf
from verl.base_config import BaseConfig
from verl.utils.fs import copy_to_local
from verl.workers.config import HFModelConfig, MtpConfig

from verl_digen.config import DigenConfig, digen_config
from verl_digen.models import load_model, read_index
from verl_digen.models.locate import locate, locate_configs, locate_index, read_object
from verl_digen.require import require
from verl_digen.user_modules import import_user_modules

if TYPE_CHECKING:
    from peft import LoraConfig

    from verl_digen.models.lora_file import LoraFile

MODEL_TYPE = "diffusion_model"
"""Key of our engine in verl's `EngineRegistry`."""

LORA_KEYS = frozenset({"rank", "alpha", "merge"})
"""Allowed keys of `actor_rollout_ref.model.lora`."""

KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of peft's `init_lora_weights` that leave the base's weights as they are."""

ADAPTER_CONFIG_NAME = "adapter_config.json"
"""peft's name for an adapter's config file."""

LORA_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name for a LoRA file."""


@dataclass
class DiffusionModelConfig(BaseConfig):
    """One diffusers checkpoint, and the part of it that trains. Every field is a key of
    `actor_rollout_ref.model`."""

    _mutable_fields = {  # noqa: RUF012 - verl's way to declare them
        *HFModelConfig._mutable_fields,
        *("digen", "enable_activation_offload", "use_remove_padding"),
        *("lora", "lora_rank", "lora_alpha", "lora_adapter_path"),
    }

    path: str = MISSING
    """Checkpoint in the diffusers format: a folder with `model_index.json`, a repository of the hub, or hdfs://."""
    use_shm: bool = False
    """Copy the checkpoint to shared memory before it is read."""
    external_lib: Any = None
    """Module of your own, or a list, imported in every process of the run: it registers models, objectives and names of
    rewards. Modules of installed packages come by their entry points `verl_digen.plugins`."""
    trust_remote_code: bool = False
    """Read by verl; diffusers transformers need none."""
    digen: DigenConfig = None  # type: ignore[assignment]
    """The `digen:` section of the config (`digen: ${digen}`), as a mapping; converted and validated here."""

    recompute_blocks: str | int = "auto"
    """Blocks whose activations backward recomputes in place of keeping them: far less memory, and for all blocks one
    forward more per row. auto: as few as memory asks for, together with the rows of a tile; none on a CPU. all, none,
    or how many of the first ones."""
    enable_gradient_checkpointing: bool = True
    """verl's key. False: as `recompute_blocks=none`."""
    enable_activation_offload: bool = False
    """Keep the inputs of recomputed blocks in pinned host memory between forward and backward: per row and block
    tokens x width x bytes. Not with `recompute_blocks=none`."""

    whole_base: bool | str = "auto"
    """Keep the frozen base under an adapter whole on every rank of the trainer while a fragment trains, in the compute
    dtype: it is gathered once, not at every tile. auto: where memory has room for it that tiles do not need more,
    decided at the first tile; not on one rank. true, false."""

    int8_base: bool = False
    """Keep the weights of the frozen base's blocks in int8, whole on every rank, in place of 2 bytes a parameter in
    shards: a base that is too large for a card. With an adapter, and with `rollout.name=trainer`, which generates with
    the weights that train."""

    lora_rank: int = 0
    """LoRA rank; 0 trains all weights."""
    lora_alpha: int = 64
    """LoRA scale is lora_alpha / lora_rank. flow_grpo: rank 32, alpha 64."""
    lora: dict[str, Any] = field(default_factory=dict)
    """verl's other spelling (`rank`, `alpha`), and `merge`: true sends merged weights to the replicas,
    false (default) the adapter alone."""
    target_modules: Any = None
    """Module-name suffixes LoRA wraps, or one regex; null takes the model's own list."""
    exclude_modules: Any = None
    """Modules LoRA leaves alone, as for `target_modules`."""
    lora_adapter_path: str | None = None
    """Adapter to continue training: peft's folder, or a LoRA in one file as diffusers, kohya's scripts and ai-toolkit
    save it (or a folder that holds one). Its rank and alpha apply, its dropout does not. The KL reference is the bare
    model."""

    # -- read by verl, without meaning here ---------------------------------------------------------------
    model_type: str = MODEL_TYPE
    hf_config: Any = None
    """Placeholder with `model_type`, the pipeline's class name."""
    tokenizer_path: str | None = None
    tokenizer: Any = None
    processor: Any = None
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    mtp: MtpConfig = field(default_factory=MtpConfig)

    @classmethod
    def of(cls, config: DictConfig, **changes: Any) -> DiffusionModelConfig:
        """The section `actor_rollout_ref.model` of a run's whole config, with other values for some keys."""
        section: Any = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True, throw_on_missing=True)
        section.pop("_target_", None)
        return cls(**section | changes)

    def __post_init__(self) -> None:
        import_user_modules(self.external_lib)
        self.digen = _to_digen(self.digen)
        for key in ("use_remove_padding", "use_fused_kernels"):
            _require(
                not self[key], f"{key} must be false: rows of a diffusion batch have one size", self[key], "drop it"
            )
        self._check_recomputation()
        index = self.local_path if "://" in self.path else locate_index(os.path.expanduser(self.path))
        self.hf_config = SimpleNamespace(model_type=read_index(index)["_class_name"])
        if self.tokenizer_path is None:
            self.tokenizer_path = self.path
        self._settle_lora()
        _require(
            self.whole_base is not True or self.lora_rank > 0,
            "whole_base must be auto or false without an adapter: every weight trains",
            self.whole_base,
            "set actor_rollout_ref.model.lora_rank",
        )
        _require(
            not self.int8_base or (self.lora_rank > 0 and not self.merges_lora),
            "int8_base must be false without an adapter that stays one: weights in int8 do not train",
            self.int8_base,
            "set actor_rollout_ref.model.lora_rank, and leave actor_rollout_ref.model.lora.merge out",
        )

    @property
    def recomputed(self) -> str | int:
        """`recompute_blocks`, "none" with verl's key off."""
        return self.recompute_blocks if self.enable_gradient_checkpointing else "none"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import the user's modules in the process that gets the config, too."""
        import_user_modules(state["external_lib"])
        self.__dict__.update(state)

    def _check_recomputation(self) -> None:
        _require(
            self.enable_gradient_checkpointing or self.recompute_blocks in ("auto", "none"),
            "recompute_blocks must be auto or none with enable_gradient_checkpointing=false",
            self.recompute_blocks,
            "drop actor_rollout_ref.model.enable_gradient_checkpointing",
        )
        _require(
            self.recomputed not in ("none", 0) or not self.enable_activation_offload,
            "enable_activation_offload must be false where no block is recomputed: what waits in host memory are the "
            "inputs of recomputed blocks",
            self.enable_activation_offload,
            "set actor_rollout_ref.model.recompute_blocks=all",
        )

    def _settle_lora(self) -> None:
        """Reduce verl's spellings and a given adapter to `lora_rank` and `lora_alpha`."""
        self.lora = dict(self.lora)
        given = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        given |= {f"lora.{name}": self.lora.get(name) for name in ("alpha", "merge")}
        unknown = sorted(self.lora.keys() - LORA_KEYS)
        _require(not unknown, f"lora must hold no keys but {', '.join(sorted(LORA_KEYS))}", unknown, "drop the others")
        self.lora = {"rank": 0, "alpha": self.lora_alpha, "merge": False} | self.lora
        rank, nested = self.lora_rank, self.lora["rank"]
        for key, value in (("lora_rank", rank), ("lora.rank", nested)):
            _require(isinstance(value, int) and value >= 0, f"{key} must be an integer >= 0", value, "0 turns LoRA off")
        _require(
            not (rank and nested) or rank == nested,
            "lora_rank and lora.rank must not contradict each other",
            (rank, nested),
            "set one of them",
        )
        self.lora_rank, self.lora_alpha = rank or nested, self.lora["alpha"]
        if self.lora_adapter_path is not None:
            self._adopt_adapter(self.lora_adapter_path)
        if self.lora_rank == 0:
            for key, value in given.items():
                _require(
                    not value,
                    f"{key} must be left out with lora_rank=0, which trains all weights and no adapter",
                    value,
                    "set actor_rollout_ref.model.lora_rank, e.g. 32",
                )
        _require(self.lora_alpha > 0, "lora_alpha must be > 0", self.lora_alpha, "twice the rank is usual")

    def _adopt_adapter(self, adapter_path: str) -> None:
        local = Path(copy_to_local(os.path.expanduser(adapter_path), use_shm=self.use_shm))
        config, file = local / ADAPTER_CONFIG_NAME, _find_lora_file(local)
        self.lora_adapter_path = str(local if config.is_file() or file is None else file)
        if self.lora_file is not None:
            adapter = self.lora_config()
            self.lora_rank, self.lora_alpha = adapter.r, adapter.lora_alpha
            return
        _require(
            config.is_file(),
            "lora_adapter_path must be a LoRA in one .safetensors file, a folder that holds one, or a peft folder with "
            f"{ADAPTER_CONFIG_NAME}",
            adapter_path,
            "give the file, or the folder that `digen export RUN --format peft` writes",
        )
        saved = read_object(config, "actor_rollout_ref.model.lora_adapter_path")
        rank, alpha = saved.get("r"), saved.get("lora_alpha")
        _require(
            type(rank) is int and rank > 0 and isinstance(alpha, int | float) and alpha > 0,
            f"lora_adapter_path must hold an {ADAPTER_CONFIG_NAME} with r >= 1 and lora_alpha > 0",
            {"r": rank, "lora_alpha": alpha},
            "save it with peft",
        )
        kind = saved.get("peft_type", "LORA")
        _require(kind == "LORA", "lora_adapter_path must hold a LoRA adapter", kind, "choose another one")
        start = saved.get("init_lora_weights", True)
        _require(
            start in KEEPS_BASE,
            f"lora_adapter_path must hold an adapter that leaves its base alone, and init_lora_weights={start} changes "
            "the base's weights, which replicas and the KL reference keep",
            adapter_path,
            "convert it with peft's `path_initial_model_for_weight_conversion`",
        )
        for key in ("target_modules", "exclude_modules"):
            _require(
                self[key] is None,
                f"{key} must be left out with lora_adapter_path, whose {ADAPTER_CONFIG_NAME} says which layers train",
                self[key],
                "drop it",
            )
        self.lora_rank, self.lora_alpha = saved["r"], saved["lora_alpha"]

    @property
    def local_path(self) -> str:
        """The checkpoint's folder on this machine; reading it the first time may fetch the checkpoint."""
        return str(locate(os.path.expanduser(self.path), use_shm=self.use_shm))

    @property
    def lora_file(self) -> Path | None:
        """The LoRA in one file that `lora_adapter_path` names; None for a peft folder, or no adapter."""
        path = Path(self.lora_adapter_path or "")
        return path if path.is_file() else None

    def read_lora_file(self) -> LoraFile:
        """`lora_file`, converted; fetches no weights of the checkpoint."""
        assert self.lora_file is not None
        from verl_digen.models.lora_file import read_lora_file  # 0.6 s of imports, for those who have such a file

        folder = self.local_path if "://" in self.path else locate_configs(os.path.expanduser(self.path))
        return read_lora_file(self.lora_file, load_model(folder))

    @property
    def merges_lora(self) -> bool:
        """True if replicas get LoRA merged into full weights."""
        return bool(self.lora["merge"])

    @property
    def has_bare_reference(self) -> bool:
        """True if the policy that a run begins with is the network without its adapter: a new one adds nothing."""
        return self.lora_rank > 0 and self.lora_adapter_path is None

    def lora_config(self) -> LoraConfig:
        """The adapter to train, for peft. Call with `lora_rank` > 0 only."""
        from peft import LoraConfig, PeftConfig  # 2 s of imports that the agent loop's processes can do without

        if self.lora_file is not None:
            return self.read_lora_file().config
        if self.lora_adapter_path is not None:
            config = PeftConfig.from_pretrained(self.lora_adapter_path)
            assert isinstance(config, LoraConfig)  # `_adopt_adapter` requires it
            config.inference_mode, config.task_type = False, None  # a task would wrap the network as a language model
            config.lora_dropout = 0.0  # replicas draw without: log-probs of the trainer would be others
            config.init_lora_weights = True  # its weights are loaded
            return config
        targets = self.target_modules
        if targets is None:
            targets = list(load_model(self.local_path).spec.lora_targets)
        return LoraConfig(
            r=self.lora_rank,
            lora_alpha=self.lora_alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=self.exclude_modules,
            bias="none",
        )

    def adapter_config(self) -> LoraConfig | None:
        """The adapter a replica must hold because weight updates carry nothing else; None if they are full weights."""
        return self.lora_config() if self.lora_rank > 0 and not self.merges_lora else None

    def get_processor(self) -> None:
        """verl saves a text model's processor with its checkpoints; a diffusers checkpoint keeps its own."""
        return None


def _find_lora_file(path: Path) -> Path | None:
    """The LoRA file at `path`, a file or a folder that holds one; None for anything else."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        files = [file for file in files if file.name == LORA_FILE] or files
        path = files[0] if len(files) == 1 else path
    return path if path.is_file() and path.suffix == ".safetensors" else None


def _to_digen(section: Any) -> DigenConfig:
    if isinstance(section, DigenConfig):
        return section
    if isinstance(section, DictConfig):  # interpolations are resolved where the section lies, before it is moved
        section = OmegaConf.to_container(section, resolve=True)
    return digen_config(OmegaConf.create({"digen": section}))


def _require(holds: bool, rule: str, value: object, remedy: str) -> None:
    require(holds, f"actor_rollout_ref.model.{rule}", value, remedy)
