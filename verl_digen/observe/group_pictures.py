# SPDX-License-Identifier: Apache-2.0
"""Best and worst sample of a few training groups, as files that an agent loop worker writes while it has the pixels;
their grid is drawn after the step.

Invariants (tests/observe/test_group_pictures.py): after the last sample of a group the files are the best and the worst
of what was offered, at most two, whatever the order; no pixels are kept.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from torch import Tensor

from verl_digen.config import DigenConfig
from verl_digen.inputs.audio import Audio
from verl_digen.observe.images import Shown, save_pixels
from verl_digen.observe.run_files import audio_path, group_dir, sample_path, video_path
from verl_digen.types import GroupTags

KEPT_STEPS = 2
"""Steps whose groups may still be generated: the newest sample's and the one before, with stale samples."""


def is_step_logged(digen: DigenConfig, step: int) -> bool:
    """True if training groups of optimizer step `step` are shown."""
    return digen.num_logged_groups > 0 and step % digen.logged_groups_every == 0


def is_group_logged(digen: DigenConfig, *, step: int, number: int, num_prompts: int) -> bool:
    """True if the group of the run's prompt `number`, for a `step` of `num_prompts`, is shown."""
    return is_step_logged(digen, step) and number % num_prompts < digen.num_logged_groups


class GroupPictures:
    """Files of the best and the worst sample so far of each group that is shown. Thread-safe.

    Example:
        pictures = GroupPictures(run_dir)
        pictures.offer(10, "p00000072", 0, 0.5, pixels)  # written
        pictures.offer(10, "p00000072", 1, 0.7, pixels)  # written: best 1, worst 0
        pictures.offer(10, "p00000072", 2, 0.6, pixels)  # not written
        pictures.offer(10, "p00000072", 3, 0.9, pixels)  # written, and 1 is removed
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lock = Lock()
        self._held: dict[tuple[int, str], dict[int, float]] = {}
        """(step, group) -> sample index -> reward of the samples that have files."""

    def offer(
        self,
        step: int,
        uid: str,
        index: int,
        reward: float,
        pixels: Tensor,
        images: Sequence[str] = (),
        audio: Audio | None = None,
    ) -> None:
        """Write a scored sample, uint8 [H, W, 3], or [F, H, W, 3] for a video, if it is the best or the worst of its
        group so far. `images`: `PromptRow.images`, read where the sample is written."""
        with self._lock:
            held = self._group(step, uid)
            if index in held:  # generated again, under newer weights
                del held[index]
                self._remove(step, uid, index)
            if held and min(held.values()) <= reward <= max(held.values()):
                return
            save_pixels(pixels, sample_path(self._run_dir, step, uid, index), images, audio)
            held[index] = reward
            if len(held) > 2:
                between = sorted(held, key=held.__getitem__)[1]
                del held[between]
                self._remove(step, uid, between)

    def _group(self, step: int, uid: str) -> dict[int, float]:
        """The group's samples with files; a new group removes what a run before a resume left of it."""
        if (step, uid) not in self._held:
            self._held = {key: held for key, held in self._held.items() if key[0] > step - KEPT_STEPS}
            self._held[step, uid] = {}
            for leftover in group_dir(self._run_dir, step).glob(f"{uid}-*"):
                leftover.unlink()
        return self._held[step, uid]

    def _remove(self, step: int, uid: str, index: int) -> None:
        path = sample_path(self._run_dir, step, uid, index)
        for own in (path, video_path(path), audio_path(path)):
            own.unlink(missing_ok=True)


def best_and_worst(run_dir: Path, step: int, groups: Mapping[str, GroupTags]) -> list[Shown]:
    """Pictures of trained groups (uid -> sample index -> tag) to show: of each its best sample, then its worst.

    A group whose best or worst trained sample has no file is shown without it: there are files of all samples that were
    scored, and some are not trained.
    """
    shown = []
    for uid, tags in sorted(groups.items()):
        for word, extreme in (("best", max), ("worst", min)):
            reward = extreme(tag.reward for tag in tags.values())
            for index, tag in sorted(tags.items()):
                path = sample_path(run_dir, step, uid, index)
                if tag.reward == reward and path.is_file():
                    shown.append(Shown(path, f"{word} of {len(tags)}: {tag.prompt}", reward))
                    break
    return shown
