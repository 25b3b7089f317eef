# SPDX-License-Identifier: Apache-2.0
"""One validation: all validation prompts to the agent loops, wait, metrics and pictures."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_digen.config import DigenConfig
from verl_digen.data.rows import ROW, prompt_batch
from verl_digen.errors import RunStopped
from verl_digen.observe.trackers import log_to_wandb
from verl_digen.processes.supervision import Supervision
from verl_digen.store.keys import VAL
from verl_digen.store.samples import PromptStatus, clear, list_partition, submit_prompts
from verl_digen.trainer.replay_buffer import POLL_INTERVAL_S
from verl_digen.trainer.run_output import begin_beside, wait_beside
from verl_digen.trainer.turns import num_events
from verl_digen.trainer.validation import draw_pictures, shown_samples, validation_metrics, validation_uid
from verl_digen.types import PromptRow, SampleTag

logger = logging.getLogger(__name__)


class Validation:
    """Validates the weights that the replicas have, with `num_samples` per prompt; pictures also go to TensorBoard if
    asked."""

    def __init__(
        self,
        digen: DigenConfig,
        run_dir: Path,
        supervision: Supervision,
        *,
        num_samples: int,
        to_tensorboard: bool,
        poll_s: float = POLL_INTERVAL_S,
    ):
        self._digen, self._run_dir, self._supervision = digen, run_dir, supervision
        self._num_samples, self._to_tensorboard = num_samples, to_tensorboard
        self._poll_s = poll_s
        self._pictures: Future[None] | None = None
        self.on_batch: Callable[[], None] = lambda: None
        """Called before a batch of prompts goes to the agent loops."""
        self.on_poll: Callable[[Iterable[PromptStatus]], None] = lambda prompts: None
        """Called with the prompts of the batch whenever they were looked at, while some have not ended."""
        self.replace_all_lost: Callable[[], bool] = lambda: False
        """Called when prompts failed; True if no replica was alive, and one is now: they are generated again."""

    def run(
        self,
        loader: Iterable[Mapping[str, Any]],
        generate: Callable[[TensorDict], Any],
        *,
        step: int,
        wandb: Any | None = None,
    ) -> dict[str, float]:
        """Validate the loader's prompts, whose batches `generate` hands to the agent loops -> `val/*`. Pictures are
        drawn in the background, see `finish_pictures`. RunStopped if every prompt of a batch failed."""
        tags: dict[str, SampleTag] = {}
        num_samples = 0
        for columns in loader:
            rows = [replace(row, uid=validation_uid(row.index)) for row in columns[ROW]]
            num_samples += len(rows) * self._num_samples
            reasons = self.generate(rows, generate, step, tags)
            for reason, count in Counter(reasons).items():
                logger.warning("%d of %d validation prompts failed: %s", count, len(rows), reason)
            if len(reasons) == len(rows):
                raise RunStopped(f"validation at step {step}: every prompt failed; the last: {reasons[-1]}")
        self.finish_pictures()
        if shown := shown_samples(self._run_dir, step, tags, self._digen.num_logged_images):
            self._pictures = begin_beside(draw_pictures, self._run_dir, step, shown, self._to_tensorboard)
        if wandb is not None:
            log_to_wandb(wandb, step, {"val/pictures": list(shown.values())}, {})
        metrics = validation_metrics(tags, num_samples)
        logger.info("validation after %d steps: reward %.4f over %d pictures", step, metrics["val/reward"], len(tags))
        return metrics

    def generate(
        self, rows: Sequence[PromptRow], generate: Callable[[TensorDict], Any], step: int, tags: dict[str, SampleTag]
    ) -> list[str]:
        """Have the prompts generated, move their samples' tags into `tags` -> the reasons of failures."""
        while True:
            batch, uids = prompt_batch(rows), [row.uid for row in rows]
            tu.assign_non_tensor_data(batch, "global_steps", step)
            tu.assign_non_tensor_data(batch, "validate", True)
            self.on_batch()
            submit_prompts(VAL, uids, step)
            generate(batch)
            reasons = self._wait(uids, tags)
            if not (reasons and self.replace_all_lost()):
                return list(reasons.values())
            rows = [row for row in rows if row.uid in reasons]

    def finish_pictures(self) -> None:
        """Wait for the pictures of the last validation, if there was one."""
        drawn, self._pictures = self._pictures, None
        wait_beside(drawn, self._digen.deadlines.setup_s, "pictures of the last validation")

    def _wait(self, uids: list[str], tags: dict[str, SampleTag]) -> dict[str, str]:
        """Wait for the prompts, move their samples' tags into `tags`, clear them -> uid: reason, of those that failed.
        DeadlineMissed if none ended for `digen.deadlines.no_progress_s`; a hung replica is detected earlier."""
        self._supervision.patience.restart()
        while True:
            found = list_partition(VAL)
            ended = [uid for uid in uids if found.prompts[uid].has_ended]
            if len(ended) == len(uids):
                break
            step = self._supervision.step()
            what = f"validation after step {step} ({len(ended)} of {len(uids)} prompts have ended)"
            prompts = [found.prompts[uid] for uid in uids]
            self._supervision.check_progress(num_events(prompts), what)
            self.on_poll(prompts)
            time.sleep(self._poll_s)
        reasons = {uid: found.prompts[uid].error for uid in uids if found.prompts[uid].status == "failure"}
        tags.update(found.samples)
        clear(VAL, [*uids, *found.samples])
        return reasons
