# SPDX-License-Identifier: Apache-2.0
"""The mutations: invariants of the rooms that decide, compute and move weights, and one way to break each.

A line is (MODULE.FUNCTION, operator, the fault in words), and where the module's own tests do not notice it, who does:
"FILE" is test_FILE.py of the room, "FILE: WORDS" the tests of it that pytest's `-k WORDS` chooses, ": WORDS" those of
the module's own. Break an invariant, not a line of code: `operators` says what lasts.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.mutations.operators import Misplaced, Operator, accept, drop, given, mutated, passes, result, skip, swap


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    room: str
    """Folder below verl_digen/, and below tests/."""
    place: str
    """Module in the room, and the qualified name of a function in it, or the last parts of either."""
    operator: Operator
    wrong: str
    """The fault, in words."""
    noticed_by: str = ""
    """See the module."""

    def __str__(self) -> str:
        return f"{self.room}/{self.place}: {self.wrong}"

    @property
    def tests(self) -> str:
        """File below tests/ whose tests run."""
        own = self.place.partition(".")[0].removesuffix("/__init__").rpartition("/")[2]
        return f"{self.room}/test_{self.noticed_by.partition(':')[0] or own}.py"

    @property
    def words(self) -> str:
        """pytest's -k, or ""."""
        return self.noticed_by.partition(":")[2].strip()

    def make(self, tree: Path) -> tuple[Path, str]:
        """(file below `tree`, its text with the fault). `Misplaced`: it cannot be made."""
        module, _, function = self.place.partition(".")
        room = tree / "verl_digen" / self.room
        files = [path for path in room.rglob("*.py") if f"/{path.relative_to(room)}".endswith(f"/{module}.py")]
        if len(files) != 1:
            raise Misplaced(f"{len(files)} modules have this name")
        return files[0], mutated(files[0].read_text(), function, self.operator)


Line = tuple[str, Operator, str] | tuple[str, Operator, str, str]

SCHEDULERS: tuple[Line, ...] = (
    ("planner.prompts_wanted", swap("self.rules.staleness.max_versions", "0"), "no batch is begun before its turn"),
    ("planner.on_slot_lost", drop("give_back"), "samples of a lost slot are forgotten"),
    ("planner.assign", swap("==", "<="), "a slot begins a group before it loads the newest weights"),
    ("planner._restart_orphans", skip(), "a group waits for a version that no slot has any more"),
    ("planner.on_scored", swap("version != chunk.version", "False"), "samples of another version count"),
    ("planner._cancel", drop("request.is_cancelled"), "an aborted chunk's time says how fast its slot is"),
    ("planner._on_assisted", swap("not self._assisting", "True"), "an assist ends with its first chunk"),
    (
        "group_book.fragment_size",
        swap("self._rules.gap.enable", "False"),
        "nothing trains while others generate",
        "planner",
    ),
    (
        "group_book.num_wanted",
        swap("self._rules.max_group_refills", "9"),
        "refills have no bound",
        "planner: the_bound",
    ),
    ("group_book.next_group", swap("<", ">"), "a younger group goes before an older one", "planner"),
    ("group_book._may_begin", swap("<", "<="), "a group more than allowed is begun under old weights", "planner"),
    ("group_book.issue_on_policy", drop("size"), "an assist takes more samples than its ranks are given", "planner"),
    ("group_book.accept", accept(), "a reward that is not a number trains", "planner"),
    ("group_book.restart", drop("group.rewards.clear"), "a group that starts over keeps its old rewards", "planner"),
    ("group_book.drop", drop("group.unissued.clear"), "samples of a dropped group are still generated", "planner"),
    ("group_book.complete", swap("<", "<="), "surplus groups go on when their batch is full", "planner"),
    ("group_book.complete", swap("self._rules.queue.drop_zero_spread", "False"), "equal rewards train", "planner"),
    ("batch.num_begun", swap(">=", ">"), "the stalest groups are not counted", "planner"),
    ("rules.largest_fragment", swap("min", "max"), "a few ranks train a second sample of a fragment"),
    ("rules.stale_allowance", swap("stale.fraction", "1.0"), "the whole batch may be stale", "planner"),
    ("play._deliver", given(scored_s="scored_s - self.bubble.score_s"), "groups train before their scores", "search"),
    ("search.decide", swap("MAX_WORK", "0"), "no choice is branched exactly"),
    ("search.counts", result("True"), "a gain counts that is smaller than the usual error", "foresight"),
    ("slots._pop_idle", swap('slot.state == "idle"', "True"), "a busy slot is handed out"),
    ("tiles.deal_rows", given(whole_samples="False"), "samples are cut without time-step parallelism", "deal"),
    ("tiles.plan_tiles", swap("most - len(own)", "0"), "a rank without rows has no tile, and the others wait for it"),
    ("tiles.plan_tiles", swap("(order(row), row)", "row"), "prompts of unlike lengths share tiles"),
    ("tiles._cost", given(is_whole="False"), "a whole base is thought to be gathered at every tile"),
    ("durations.parts_s", swap("variance > MIN_SIZE_VARIANCE", "False"), "a call has no fixed part"),
)

ALGORITHMS: tuple[Line, ...] = (
    ("advantages.group_advantages", swap("values[samples].mean()", "values.mean()"), "the batch's mean is subtracted"),
    ("advantages.advantage_scale", swap("divisor.max()", "divisor.min()"), "the smallest spread is the scale"),
    ("advantages._std", given(ddof="0"), "the population's spread in place of the sample's"),
    ("ema.ema_update_", given(decay="1 - decay"), "the average forgets what it should keep"),
    ("forward.draw_noise_levels", given(uid="''"), "all groups have the same noise levels"),
    ("noise.step_noise", given(step="0"), "every step has the same noise"),
    ("window.draw_window", given(step="0"), "a moving window stands still"),
    ("outside.step_ends", swap("sde_steps[-1] + 1", "sde_steps[-1]"), "steps of the window are passed over"),
    ("step_cache.reusable", given(is_sde="[False] * len(is_sde)"), "a recorded step takes an old velocity"),
    ("tree.node", swap(">", ">="), "leaves of a tree split one step late"),
    ("tree.tree_advantages", swap("level.mean()", "own.mean()"), "nodes are compared with the mean over their leaves"),
    ("sde._euler_maruyama", result("(2 - result[0], *result[1:])"), "the drift has the wrong sign"),
    ("sde._euler_maruyama", result("(*result[:2], result[2].square())"), "noise grows with the step, not its root"),
    ("sde.sde_step", given(storage_dtype="None"), "x is rounded after its log-prob is taken"),
    ("sde.sde_step", swap("outcome.detach()", "outcome"), "the gradient of a log-prob goes through x'"),
    ("solvers/__init__.denoise_step", swap("level if sde else 0.0", "level"), "every row is stochastic", "solvers"),
    ("dpm2.second_order", result("0 * result"), "dpm2 is of first order", "solvers"),
    ("rows.mean", swap("self.num_rows", "self.is_row.sum()"), "a tile's mean is over its own rows", "losses"),
    ("rows.mean", result("per_row.sum() / self.num_rows"), "padding rows add to a loss", "losses"),
    ("kl._flow_grpo", result("_exact(rows)"), "flow_grpo's KL is that of the step's std", "losses"),
    ("ratio.ppo_clip", swap("torch.maximum", "torch.minimum"), "the clip takes the better of two", "losses"),
    ("ratio.clamped_advantage", result("rows['advantage']"), "advantages are not clamped", "losses"),
    ("ratio.ratio_of", result("log_ratio.exp()"), "an extreme ratio is infinite", "losses"),
    ("ratio.ratio_of", result("1 / result"), "the ratio is upside down", "losses"),
    ("grpo_guard.guarded_ratio", swap("+", "-"), "the drift of the ratio is not made up for", "losses"),
    ("decoupled_ppo.decoupled_clip", swap("config.cap", "1e9"), "the weight of stale samples has no cap", "off_policy"),
    ("gspo.trajectory_log_ratios", swap("sums / counts", "sums"), "a trajectory's ratio is a sum", "off_policy"),
    ("topr.tapered_reinforce", swap(">", "<"), "good samples are tapered in place of bad ones", "off_policy"),
    ("denominator.choose_denominator", given(max_versions="0"), "stale samples train as fresh ones", "off_policy"),
    ("matching.sums_together", swap("ids", "ids[:1]"), "rows of two levels are compared", "forward_losses"),
    ("dgpo.group_weights", result("1 - result"), "groups in the right order weigh more", "forward_losses"),
    ("dpo.preferred_pair", result("result or (0, 1)"), "equal rewards make a pair", "forward_losses"),
    ("diffusion_nft.implicit_policies", swap("old - towards", "old + towards"), "both implicit policies move one way"),
)

ENGINE: tuple[Line, ...] = (
    ("ledger.__init__", given(clip="2 * clip"), "samples train before the batch that are clamped in it"),
    ("ledger._largest_unclamped", swap("self.num_samples", "len(self.samples)"), "samples to come are forgotten"),
    ("ledger.add", accept(), "a group trains twice"),
    ("ledger.take", given(is_last="False"), "groups that were dropped leave the batch open for ever"),
    ("ledger.take", swap("index not in given", "False"), "samples held back are forgotten"),
    ("ledger.__init__", given(scale="None"), "a mini-batch has a scale of its own", "invariants: mini_batches"),
    (
        "transaction.settle",
        given(divisor="1 / divisor"),
        "centred rewards are multiplied",
        "two_ranks_fragments: max_group",
    ),
    ("transaction.settle", drop("gradients.add_"), "the KL term's gradient is lost", ": serial_loop and kl"),
    (
        "transaction.close",
        swap("self.num_trained_rows", "self.num_rows", 2),
        "groups that were dropped count as trained",
        "properties",
    ),
    ("transaction.require_sound", accept(), "a batch trains on after a failure", "properties"),
    ("transaction.drop", drop("recover"), "an abort leaves a module in a forward that failed", "properties"),
    ("transaction._backward", passes(clamps="True"), "centred rewards are clamped", ": serial_loop"),
    (
        "transaction.__init__",
        swap("engine.state.loss_scale.value", "1.0"),
        "the gradient of fp16 stays scaled",
        "loss_scale: clipping",
    ),
    (
        "transaction.__init__",
        swap("engine.get_data_parallel_size()", "1"),
        "the loss is a mean over the rows of one rank",
        "invariants: two_ranks and cispo",
    ),
    (
        "transaction.__init__",
        swap("engine.sum_over_ranks", "lambda x: x"),
        "a rank makes the joint column of its own rows alone",
        "invariants: two_ranks and gspo",
    ),
    ("loss._with_old", result("(None, others)"), "stale samples have ratio 1", "invariants: earlier_version"),
    (
        "transaction.__init__",
        swap("engine.ulysses_sequence_parallel_size", "1"),
        "gradients of ranks that share a row are averaged",
        "sequence",
    ),
    ("gradients.exchanged", drop("put", 2), "a gradient that was moved aside does not come back"),
    ("gradients.reduce_pending", skip(), "what no backward reduced is never reduced"),
    ("loss.total", result("self.scaled"), "the KL term is not trained"),
    ("loss._noise_rate", swap("rows.sampling.law", "'flow'"), "KL terms of cps are those of an SDE", ": spread"),
    ("loss.__call__", given(clamps="True"), "advantages that are still to be divided are clamped"),
    (
        "logical_batch._train",
        swap("loss.objective.reads_advantages(loss.config)", "True"),
        "a loss without advantages is divided by their scale",
        "transaction: alone",
    ),
    ("logical_batch.finish", drop("_train"), "samples that are held back never train", "properties"),
    ("planning.deal", passes(advantages="advantages[: len(needed)]"), "a rank takes the first samples' advantages"),
    ("planning.deal", passes(whole_samples="False"), "trajectories are cut without time-step parallelism"),
    ("planning._measure", passes(later_bytes="0"), "a tile leaves Adam's moments no room", "tight_device: for_moments"),
    ("memory.gradients_may_wait", result("True"), "gradients wait whatever memory there is"),
    (
        "fragment.fragment_rows",
        result("[row._replace(bucket=0) for row in result]"),
        "pictures of two sizes share a tile",
        "rows",
    ),
    ("rows.ForwardPoints.make", swap("sample.facts.sample_index", "index"), "noise depends on the rank"),
    ("rows.PathPoints.make", passes(old_log_probs="None"), "old log-probs are not used", "updates: several_updates"),
    ("rows.rows_of", swap("tile.is_filler", "False"), "a padding tile trains"),
    ("rows.make_rows", passes(conditions="[pairs[0][0] for _ in pairs]"), "all rows of a tile have one prompt"),
    ("rows.row_advantages", given(samples="samples[::-1]"), "rows have others' advantages", "transaction: serial_loop"),
    ("rows.joint_columns", swap("values", "values.flip(0)"), "numbers of a tile's rows end in the wrong places"),
    (
        "policies.without_adapter",
        swap("True", "False"),
        "LoRA's reference is the policy itself",
        "transaction: lora_kl",
    ),
    ("copies.swapped_in", drop("_write", 2), "a copy's weights stay in the module"),
    ("copies.follow_batch", swap("decay.is_due(before, k)", "True"), "a reference is renewed after every batch"),
    ("copies.state_dict", result("{}"), "policies that follow are not saved"),
    (
        "sharded.optimizer_step",
        swap("math.isfinite(grad_norm)", "True"),
        "a gradient that is not finite counts as a step",
        "invariants: not_finite",
    ),
    (
        "sharded.get_per_tensor_param",
        swap("self._of_exported(tensors)", "tensors"),
        "replicas get the current policy",
        "invariants: assists",
    ),
    ("sharded._exported", result("nullcontext()"), "an assist has the weights that train", "invariants: assists"),
    ("engine.commit", given(more="True"), "the learning rate does not move at a commit", "worker: one_update"),
    ("engine._require_closed", skip(), "a batch is begun beside an open one", "transaction: illegal_calls"),
    (
        "verl_batches.lr_scheduler_step",
        drop("self.copies.drop"),
        "the old weights are those of the last batch",
        ": old_weights",
    ),
    ("optimizer.update", given(is_finite="True"), "the loss scale only grows", "loss_scale: scale_halves"),
    ("export.merge", swap("+", "-"), "an adapter is merged with the wrong sign"),
    ("gradients.project", given(offset="None"), "every shard is projected as if it were the first"),
    (
        "checkpoint._load_extra",
        swap("extra['lr_scheduler'] | rates", "extra['lr_scheduler']"),
        "a run keeps the learning rate of its checkpoint",
        ": own_learning",
    ),
    ("arrival.close", drop("_thread.shutdown"), "a fetch outlives its batch"),
    ("arrival.request", swap("number & (number + 1) == 0", "False"), "the first tile waits for all samples"),
    (
        "assistant.deal_samples",
        result("[list(filter(None, own)) for own in result]"),
        "a rank with fewer batches leaves the others alone in their forwards",
        ": as_many",
    ),
    ("fsdp2.forwards", given(keeps="False"), "an assist gathers the weights at every step", "assistant: gathers"),
    ("checkpoint.base_fingerprint", result("''"), "an adapter is resumed on any base", ": refused"),
    ("checkpoint.clear", skip(), "a save that failed leaves a folder", ": full_disk"),
    ("checkpoint.remove_earlier", skip(), "earlier checkpoints stay", ": earlier_starts"),
    ("checkpoint._load_extra", swap("'rng' in extra", "False"), "random states are not restored", ": bitwise"),
    (
        "checkpoint._load_own",
        swap("self.rank if is_same_number else 0", "0"),
        "all ranks have rank 0's state",
        "resharding: their_rank",
    ),
    (
        "saved_state.__init__",
        swap("(folder / METADATA).is_file()", "True"),
        "an unfinished folder is taken",
        "checkpoint: unfinished",
    ),
)

WEIGHTS: tuple[Line, ...] = (
    ("receiver.load", drop("copy_"), "an update is checked and not loaded"),
    ("receiver.begin_live", drop("self.is_whole"), "a replica serves while a live update is under way"),
    ("receiver.check_complete", skip(), "an update that misses a tensor is taken"),
    ("receiving.finish", skip(), "an update with other numbers than were sent is taken", "transfer"),
    ("receiving._check", skip(), "an abandoned update keeps its thread", "transfer"),
    ("sending.check", skip(), "a sender waits for a receiver that died", "transfer: receiver_that_died"),
    ("checksum.Checksum.add", given(tensor="tensor.abs()"), "signs are not in the checksum"),
    ("gloo._aligned", result("result - ALIGNMENT_BYTES"), "pieces of a bucket overlap", ": buckets"),
    ("gloo.MeetingPoint.of", swap("len(generations) == 1", "True"), "an older group's rank is out", ": gloo_group"),
    ("host_copies._is_equal", result("True"), "other weights are taken for these", "shared_copy: other_weights"),
    (
        "host_copies._find",
        swap("whole[0] == READY", "True"),
        "an incomplete copy is taken",
        "shared_copy: not_completed",
    ),
)

PROCESSES: tuple[Line, ...] = (
    ("deadlines.bound", swap("self.scores_groups", "False"), "a score is given up while a sample comes again"),
    ("actors.silence", swap("is_starting(actor)", "False"), "a process that starts counts as hung", "supervision"),
    ("calls.check", swap("self._config.no_progress_s", "1e9"), "a wait without progress never ends", "supervision"),
    ("supervision._guard", skip(), "a blocking call never ends"),
)

STORE: tuple[Line, ...] = (
    ("client.fetch_columns", swap("_MADE.is_set()", "True"), "a second thread calls before the client is made"),
    (
        "conditions.own_condition_keys",
        swap("own_condition_key(uid, '')", "uid"),
        "conditions of another group go",
        "samples: nothing_is_left",
    ),
    ("client.fetch_columns", given(keys="keys[::-1]"), "samples come in another order than asked for", "samples"),
    (
        "samples.to_listing",
        swap("entry", "True", 3),
        "a sample that is being stored is listed",
        "samples: being_stored",
    ),
)

TABLE = tuple(
    Mutation(room, *line)
    for room, lines in {
        "schedulers": SCHEDULERS,
        "algorithms": ALGORITHMS,
        "engine": ENGINE,
        "weights": WEIGHTS,
        "store": STORE,
        "processes": PROCESSES,
    }.items()
    for line in lines
)

LONG = frozenset({"engine/test_resharding.py"})
"""Files whose tests are marked long, and run all the same."""
