# SPDX-License-Identifier: Apache-2.0
"""Table of docs/memory.md: one training tile of every recipe by PyTorch's memory tracker and by `digen plan`.

    python -m tests.plan.tracker                       # every recipe on 8 and 64 ranks: half an hour of one core
    python -m tests.plan.tracker digen_sd3 --ranks 8
    python -m tests.plan.tracker --cards               # recipes of one card: four minutes of one core

A peak grows by the same number of bytes with every block, so that it is tracked in two networks of few blocks and
extended to the published number. Where blocks are of two kinds, both grow in the published proportion; Stable Diffusion
3.5, where that is 13 to 11, is tracked whole.
"""

import os

if __name__ == "__main__":
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported

import argparse
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.plan.fake_engine import Depth, Peak, peak_of_tile, plan_run, shallow
from verl_digen.models.checkpoint import read_config
from verl_digen.tools.plan.memory import RUNTIME, Memory, plan_memory

GB = 10**9
DEVICE_BYTES = 80 * GB
NO_TENSORS = ("replica that waits", RUNTIME)
"""Items of the plan that are no tensors of the rank."""


@dataclass(frozen=True)
class Case:
    """A recipe and its published checkpoint."""

    recipe: str
    repository: str
    blocks: Mapping[str, int] = field(default_factory=lambda: {"num_layers": 1})
    """Keys of the network's config that count blocks -> their proportion; none: the network is tracked whole."""
    few: int = 3
    """Times `blocks` that the smaller network has."""
    more: int = 6
    """Times `blocks` that the larger network has."""
    words: tuple[str, ...] = ()
    card_gb: int | None = None
    """Memory of the one device of the recipe; None: 8 or more of 80 GB."""

    @property
    def name(self) -> str:
        return " ".join([self.recipe, *(word.rpartition(".")[2] for word in self.words)])


def _size(height: int, width: int, frames: int) -> tuple[str, ...]:
    sides = {"height_px": height, "width_px": width, "num_frames": frames}
    return tuple(f"digen.sampling.{key}={value}" for key, value in sides.items())


TWO_KINDS: Any = {"blocks": {"num_layers": 1, "num_single_layers": 2}, "few": 2, "more": 4}
HEADER = """\
| recipe | ranks | rows of a tile | blocks recomputed | tracker | plan | difference | whole plan, of 80 GB |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
ONE_ROW = ("digen.tsp.samples_per_tile=1", "digen.tsp.steps_per_tile=1")
WAN, HUNYUAN = "Wan-AI/Wan2.1-T2V-14B-Diffusers", "hunyuanvideo-community/HunyuanVideo"
CASES = (
    Case("digen_qwen_image", "Qwen/Qwen-Image"),
    Case("digen_sd3", "stabilityai/stable-diffusion-3.5-medium", blocks={}),
    Case("digen_flux", "black-forest-labs/FLUX.1-dev", **TWO_KINDS),
    Case("digen_z_image", "Tongyi-MAI/Z-Image-Turbo", {"n_layers": 1}),
    Case("digen_wan2_1", WAN),
    Case("digen_wan2_2", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    # with fewer blocks the first one's moment is the fullest, which grows by less than the last one's
    Case("digen_hunyuan_video", HUNYUAN, **TWO_KINDS | {"few": 4, "more": 6}),
    Case("digen_hunyuan_video15", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"),
)
SHARED_ROW = ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",)
OFFLOAD = ("actor_rollout_ref.model.enable_activation_offload=true",)
SHARDED = "actor_rollout_ref.model.whole_base=false"
LARGE = (
    Case("digen_wan2_1", WAN, words=(*_size(480, 832, 81), *ONE_ROW)),
    *(
        Case("digen_hunyuan_video", HUNYUAN, **TWO_KINDS, words=(*_size(720, 1280, 129), *ONE_ROW, *words))
        for words in ((), OFFLOAD, SHARED_ROW, (*SHARED_ROW, *OFFLOAD))
    ),
)
"""Sizes above the recipes'."""
SD3 = "stabilityai/stable-diffusion-3.5-medium"
INT8 = ("actor_rollout_ref.model.int8_base=true",)
CARDS = (
    Case("digen_sd3+flowgrpo_fast+gpu24", SD3, blocks={}, card_gb=24),
    Case("digen_sd3+gpu24", SD3, blocks={}, card_gb=24),
    Case("digen_flux2_klein+gpu24", "black-forest-labs/FLUX.2-klein-base-4B", blocks={}, card_gb=24),
    Case("digen_z_image+gpu24", "Tongyi-MAI/Z-Image-Turbo", {"n_layers": 1}, card_gb=24),
    Case("digen_wan2_1+gpu24", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", card_gb=24),
    Case("digen_flux+flowgrpo_fast+gpu48", "black-forest-labs/FLUX.1-dev", **TWO_KINDS, card_gb=48),
    Case("digen_qwen_image+gpu80", "Qwen/Qwen-Image", card_gb=80),
    Case("digen_flux+flowgrpo_fast+gpu24", "black-forest-labs/FLUX.1-dev", **TWO_KINDS, words=INT8, card_gb=24),
    Case("digen_qwen_image+gpu48", "Qwen/Qwen-Image", words=INT8, card_gb=48),
)


def words_of(case: Case) -> list[str]:
    """Words of a run whose samples divide among 64 ranks, with a sharded base, as the tracker knows units of one group
    alone; or of one on one card."""
    batch = () if case.card_gb is not None else ("data.train_batch_size=64", SHARDED)
    return [f"recipe={case.recipe}", *batch, *case.words]


def tile_bytes(memory: Memory) -> int:
    """The plan's figure for what the tracker counts."""
    training = memory.training
    items = sum(size for name, size in training.items.items() if name not in NO_TENSORS)
    return items + training.row_bytes * training.num_rows


def reduce_of(memory: Memory) -> str:
    """When the planned run reduces gradients."""
    (name,) = [name for name in memory.training.items if name.startswith("unreduced gradients")]
    return name.partition("(")[2].rstrip(")")


def track(case: Case, depth: Depth, num_ranks: int, memory: Memory, num_recomputed: int) -> Peak:
    """Track a tile of the run `memory`, with as many rows, in a network of this depth."""
    with shallow(case.repository, depth) as folder:
        return peak_of_tile(
            words_of(case),
            num_ranks,
            str(folder),
            num_rows=memory.training.num_rows,
            reduce=reduce_of(memory),
            num_recomputed=num_recomputed,
        )


def plan_case(case: Case, num_ranks: int) -> Memory:
    """The plan of a recipe with its published network."""
    device_bytes = DEVICE_BYTES if case.card_gb is None else case.card_gb * GB
    return plan_memory(plan_run(words_of(case), num_ranks, case.repository), device_bytes)


def track_published(case: Case, num_ranks: int, memory: Memory) -> int:
    """Peak of the published network, from networks of few blocks."""
    if not case.blocks:
        return track(case, {}, num_ranks, memory, memory.num_recomputed).total
    few, slope = track_line(case, num_ranks, memory)
    found = few + slope * (published_depth(case) - case.few)
    num_kept = memory.num_blocks - memory.num_recomputed
    if memory.num_recomputed and num_kept > case.few:  # some of both: kept blocks have a slope of their own
        deep = partial(track, case, depth_of(case, case.more), num_ranks, memory)
        recomputed = recomputed_of(case, case.more, memory)
        more = deep(recomputed - case.few).total - deep(recomputed).total
        found += more / case.few * (num_kept - case.few)
    return round(found)


def track_line(case: Case, num_ranks: int, memory: Memory) -> tuple[int, float]:
    """(peak of the smaller network, bytes that each further `case.blocks` adds)."""
    few, more = (
        track(case, depth_of(case, times), num_ranks, memory, recomputed_of(case, times, memory)).total
        for times in (case.few, case.more)
    )
    return few, (more - few) / (case.more - case.few)


def recomputed_of(case: Case, times: int, memory: Memory) -> int:
    """Recomputed blocks of a network with `times` times `case.blocks`: none if the run recomputes none, else all but as
    many as the run keeps, and at most `case.few`."""
    others = memory.num_blocks - published_depth(case) * sum(case.blocks.values())
    kept = min(memory.num_blocks - memory.num_recomputed, case.few)
    return others + times * sum(case.blocks.values()) - kept if memory.num_recomputed else 0


def depth_of(case: Case, times: int) -> Depth:
    """Changed keys of a network's config that has `times` times `case.blocks`."""
    return {key: proportion * times for key, proportion in case.blocks.items()}


def published_depth(case: Case) -> int:
    """Times `case.blocks` that the published network has."""
    with shallow(case.repository, {}) as folder:
        config = read_config(folder, "transformer/config.json")
    (times,) = {config[key] // proportion for key, proportion in case.blocks.items()}
    return times


def line(case: Case, num_ranks: int) -> str:
    """The row of a recipe in Markdown."""
    memory = plan_case(case, num_ranks)
    tracked, planned = track_published(case, num_ranks, memory), tile_bytes(memory)
    return (
        f"| {case.name} | {num_ranks} | {memory.training.num_rows} | {memory.num_recomputed} of {memory.num_blocks} | "
        f"{tracked / GB:.2f} GB | {planned / GB:.2f} GB | {planned / tracked - 1:+.1%} | "
        f"{memory.peak_bytes / GB:.1f} GB, {'fits' if memory.fits else 'does not fit'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of recipes; none: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--cards", action="store_true", help="recipes of one card")
    parser.add_argument("--large", action="store_true", help="the sizes above the recipes'")
    parser.add_argument("--only", type=int, metavar="NUMBER", nargs="+", help="numbers of the cases, from 0")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    print(HEADER, flush=True)
    cases = CARDS if args.cards else LARGE if args.large else CASES
    for case in cases if args.only is None else [cases[number] for number in args.only]:
        ranks = args.ranks if case.card_gb is None else [1]
        for num_ranks in ranks if not args.recipes or case.recipe in args.recipes else ():
            print(line(case, num_ranks), flush=True)


if __name__ == "__main__":
    main()
