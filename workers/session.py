"""What the user's loop sees: `Session`, and `Step`, the `with` block of one optimizer step.

The block computes this rank's micro-batches, reduces, votes and commits. Losing a peer cancels it;
regrouping happens at its end (workers/membership/member.py), and the loop goes round again.
"""

import time
from collections.abc import Iterator, Set
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.worker_spec import WorkerSpec
from workers import evaluation
from workers.checkpoint.saver import Saving
from workers.data.loader import AnyLoader, LoadedBatch
from workers.data.placement import to_device
from workers.data.step_batches import StepBatches
from workers.distributed.device_wait import mark, wait_for
from workers.distributed.exchange import gather_json
from workers.health.device_time import device_time_of
from workers.measure import measure
from workers.membership.events import Loop
from workers.membership.member import Member
from workers.membership.unwinding import let_go, lost_peer_in
from workers.nonfinite import Inspection, judge
from workers.parallel.strategy import NoPasses, Passes
from workers.reduction.reducers import Reduced, Reducer
from workers.scalars import taken_with
from workers.step.randomness import seed_microbatch
from workers.step.vote import (
    Ballot,
    CompletedVote,
    Logged,
    Microbatches,
    Names,
    Prepared,
    Repeated,
    Vote,
    VoteLayout,
    add_up,
    decode,
    encode,
    kept,
)
from workers.train_state.out_of_memory import does_not_fit
from workers.train_state.train_state import Update
from workers.verify import verify


class Session:
    """A worker's side of the run. `model` and `optimizer` stay valid after every regroup."""

    def __init__(self, spec: WorkerSpec, workload: Any, member: Member, loader: AnyLoader) -> None:
        self.workload = workload
        self._spec, self._member, self._loader = spec, member, loader
        self._reducer: Reducer | None = None
        self._passes: Passes = NoPasses()
        self._reducer_of = (0, ())  # generation, tracked buffers
        self._assigned = (0, 0)  # generation, next step that the loader works ahead for
        self._logged: Logged = {}
        self._open: Step | None = None
        train_state = member.train_state
        self._names = Names(tuple(train_state.parameters), train_state.buffers.names)
        self._inspection = Inspection(member)
        self.attempt: LoadedBatch | None = None
        """The micro-batch at hand, for error messages; without rows while it is being loaded."""
        self.attempted_step: int | None = None
        """The step at hand, likewise; None outside of steps."""

    # --- what a loop reads ---------------------------------------------------------
    @property
    def model(self) -> nn.Module:
        """On `device`; one object for the whole life of the process."""
        return self._member.train_state.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """commit() steps it; do not step it yourself."""
        return self._member.train_state.optimizer

    @property
    def scheduler(self) -> Any | None:
        """What `build_scheduler` returned, None without one; commit() steps it."""
        return self._member.train_state.scheduler

    @property
    def device(self) -> torch.device:
        """Where the model and the batches are: the CPU, or this worker's only GPU."""
        return self._member.device

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._spec.steps

    @property
    def step(self) -> int:
        """Committed steps so far. The first look waits until this worker is a member."""
        return self._joined().train_state.step

    @property
    def rank(self) -> int:
        """Position in the current membership; changes with it."""
        return self._joined().rank

    @property
    def world_size(self) -> int:
        """Members of the current generation; changes with it."""
        return self._joined().world_size

    @property
    def generation(self) -> int:
        """The number of the current membership: 1, then one more with every regroup."""
        return self._joined().generation

    @property
    def eval_every(self) -> int | None:
        """Steps between evaluations, None for none; the loop acts on it."""
        return self._spec.eval_every

    def _joined(self) -> Member:
        if not self._member.has_joined:
            self._member.wait_for_generation()
        return self._member

    # --- what a loop does ------------------------------------------------------------
    def next_step(self) -> "Step":
        """The next step's `with` block. Waits while the run regroups.

        RuntimeError if the block before is still open or all steps are committed.
        """
        if self._open is not None:
            raise RuntimeError("next_step(): the block of the step before is still open")
        member = self._joined()
        if member.train_state.step >= self.steps:
            why = f"all {self.steps} steps are committed; loop while session.step < session.steps"
            raise RuntimeError(f"next_step(): {why}")
        member.boundary()
        return Step(self)

    def log(self, **values: Any) -> None:
        """Fold named numbers over micro-batches and ranks, as the loss is: their mean goes into
        the `user` field of the step's line in metrics.jsonl. Inside the block: this step's; after
        it: the next step's (after the last step it is lost).

        values: numbers, or tensors of one element; others raise what float() raises.
        """
        if self._open is not None and not self._passes.has_loss:
            return  # the stage that has it logs this forward's
        for name, value in values.items():
            self._logged[name] = kept(value)

    def save(self, *, pin: bool = False) -> Saving:
        """Save a checkpoint of this step in the background. Every rank must call it, after the
        same step's block. pin: retention never deletes it. `wait()` on the result tells when it
        is durable. RuntimeError inside a block, and for a run without storage.
        """
        if self._open is not None or not self._spec.has_checkpoints:
            why = "inside a step's block" if self._open is not None else "without storage"
            raise RuntimeError(f"save() {why}; call it after the block, in a run with storage")
        by = self._joined()
        return by.saver.save(by.train_state, by, lambda: by.is_cancelled, is_pinned=pin)

    def _take_logged(self) -> Logged:
        logged, self._logged = self._logged, {}
        return logged

    def forget_logged(self) -> None:
        """Drop what was logged and belongs to no step."""
        self._logged = {}

    def evaluate(self, dataset: Any, fn: Any) -> Any:
        """Run `fn(model, batch)` over a map-style dataset, shared among the ranks, in eval mode.

        Every rank must call it, after a step's block. What fn returns is a number (mean over the
        batch), (sum, weight), or a dict of name to either. The result is the weighted mean over
        the dataset: one float, or a dict of name to float; equal on all ranks.

        Retried after a loss. RuntimeError before the first step or inside a block, ValueError for
        an empty dataset.
        """
        if not self._member.has_joined:
            raise RuntimeError(
                "evaluate() before the first step: newcomers run that code too, at another step; "
                "call it after a step's block"
            )
        if self._open is not None:
            raise RuntimeError("evaluate() inside a step's block; call it after the block")
        return evaluation.evaluate(self._member, self.workload, dataset, fn)

    def _assign_loader(self, ids: range) -> None:
        """Load this rank's micro-batches ahead from here on, unless it does so already."""
        member, step = self._member, self._member.train_state.step
        if ids and self._assigned != (member.generation, step):
            self._passes.loader(self._loader).assign(step, ids)
        self._assigned = (member.generation, step + 1)

    def _take_reducer(self) -> Reducer:
        """This generation's reducer; its passes begin a step."""
        member = self._member
        key = (member.generation, member.train_state.buffers.tracked)
        if self._reducer is None or self._reducer_of != key:
            if self._reducer is not None:
                self._reducer.close()
                self._reducer = None  # its memory may serve the next one
            group, parameters = member.group, member.train_state.parameters
            assert group is not None
            self._reducer = member.strategy.reducer(parameters, member.mesh, group)
            self._passes = member.strategy.passes(member.mesh, group, self._reducer)
            self._reducer_of = key
        self._passes.begin(member.train_state.step)
        return self._reducer


class Step:
    """One attempt at one optimizer step.

    A lost peer raises StepCancelled in the block, which swallows it. RuntimeError at the block's
    end without commit(), and for calls out of order: iterate, backward() for each, commit().
    """

    def __init__(self, session: Session) -> None:
        self._session, self._member = session, session._member
        self.committed = False
        """The step counts; set by commit(), or when a lost peer's commit is rolled forward."""
        self._is_agreed = False
        """All members have voted for it."""
        self._from_step = self._member.train_state.step
        self._done = Microbatches()
        self._reducer: Reducer | None = None
        self._order = self._ids = self._member.ids
        """This rank's micro-batches, and that of each forward."""
        self._num_forwards = 0
        self._is_awaiting_backward = False
        self._num_passes_left = 0

    def __enter__(self) -> "Step":
        self._session._open = self
        self._member.move_loop(Loop.STEP)
        self._session.attempted_step = self._from_step + 1
        self._carried = dict(self._session._logged)  # logged since the step before
        self._began = time.perf_counter()
        self._vitals = self._member.vitals
        self._vitals.begin_step(device_time_of(self._member.device))
        self._member.compilation.hear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._session._open = None
        try:
            return self._end(error)
        finally:
            self._member.move_loop(Loop.OUTSIDE)

    def _is_cancelled_with(self, error: BaseException | None) -> bool:
        """Once all have agreed, an error is that of the step itself, as on every rank."""
        if error is None:
            return not self.committed and self._member.is_cancelled
        is_users = not self._is_agreed or (self.committed and lost_peer_in(error) is not None)
        error = does_not_fit(error, self._member.world_size, self._member.strategy.fitted_over)
        return isinstance(error, StepCancelled) or (is_users and self._member.is_over_with(error))

    def _end(self, error: BaseException | None) -> bool:
        """True if the block was cancelled, which swallows the error."""
        self._vitals.enter("user")
        self._session._passes.reset()
        self._member.train_state.casting.restore()
        if self._is_cancelled_with(error):
            let_go(error, self._member.device)
            self._session._logged = self._carried  # the next attempt takes it again
            self._session.attempt = self._session.attempted_step = None
            self._member.strategy.reset()
            self._member.train_state.buffers.restore_all()  # newcomers may copy the state from here
            if not isinstance(error, Repeated):
                # a pause waits for the boundary: a step that counts after all may be evaluated
                self._member.wait_for_generation()
            self.committed = self._member.train_state.step > self._from_step
            if self.committed:
                self._session.forget_logged()
            return True
        if error is None and not self.committed:
            why = "ended without step.commit(); call it once, after the last micro-batch"
            raise RuntimeError(f"the step's block {why}")
        if error is None:
            self._session.attempted_step = None
        return False

    def microbatches(self) -> Iterator[Any]:
        """This rank's micro-batches in id order, each to be followed by one `backward(loss)`.

        Each is what `collate` makes of RunConfig.micro_batch samples, on the session's device.
        """
        self._check_cancelled()
        if self._reducer is not None:
            raise RuntimeError("microbatches() a second time in one step; iterate it once")
        session, member = self._session, self._member
        self._reducer = session._take_reducer()
        self._reducer.begin()
        member.train_state.buffers.begin_step()
        member.train_state.casting.cast()
        batches = self._assign_batches()
        for self._num_passes_left in reversed(range(member.num_passes)):
            if self._num_forwards == len(self._order):
                self._reducer.serve_pass()
                continue
            self._vitals.enter("data")
            loaded = self._next_batch(batches)
            batch = to_device(loaded.batch, member.device)
            member.train_state.buffers.begin_microbatch()
            seed_microbatch(session._spec.seed, self._from_step, loaded.microbatch_id)
            session._passes.before_forward(loaded.microbatch_id)
            self._vitals.enter("compute")
            self._is_awaiting_backward = True
            yield batch
            self._check_cancelled()
            if self._is_awaiting_backward:
                raise RuntimeError("a micro-batch went by without step.backward(loss)")
        session.attempt = None

    def _assign_batches(self) -> StepBatches:
        session, member = self._session, self._member
        session._assign_loader(self._ids)
        self._order = session._passes.order(self._ids)
        loader = session._passes.loader(session._loader)
        return StepBatches(loader, self._from_step, self._order, lambda: member.is_cancelled)

    def _next_batch(self, batches: StepBatches) -> LoadedBatch:
        session = self._session
        session.attempt = batches.coming()
        session.attempt = batches.take()
        return session.attempt

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> None:
        """Gradients of one micro-batch's loss.

        loss: a scalar, the mean over the micro-batch; or (sum, weight), two scalars. WrongInput
        for another form and for a loss without a gradient.
        """
        self._check_cancelled()  # first: the user's code may have swallowed it, and made no loss
        session, member = self._session, self._member
        if not self._is_awaiting_backward or self._reducer is None or session.attempt is None:
            raise RuntimeError("backward() belongs inside `for batch in step.microbatches()`, once")
        found = session._passes.loss_of(loss)
        attempt, scale = session.attempt, member.train_state.loss_scale
        session._inspection.before_backward(session._passes)
        try:
            total = found and (found[0] * scale.value if scale else found[0])
            session._passes.backward(attempt.microbatch_id, total, self._num_passes_left)
        except Exception:
            self._check_cancelled()  # a sharded backward met a lost peer
            raise
        finally:
            session._inspection.after_backward()
        self._is_awaiting_backward = False
        self._num_forwards += 1
        if found is not None:  # else another rank has the loss, and what follows from it
            self._done.add(*found, attempt.rows, session._take_logged())

    def commit(self) -> None:
        """Reduce, vote, divide, clip, step the optimizer and the scheduler; then the step counts.

        Gradients that are not finite leave the weights as they are, and the step counts as well;
        FloatingPointError for more than FaultPolicy.max_nonfinite such steps in a row.
        """
        if self.committed:
            raise RuntimeError("commit() a second time in one step")
        self._check_cancelled()
        if self._reducer is None or self._num_forwards != len(self._order):
            raise RuntimeError(
                f"commit() after {self._num_forwards} of {len(self._order)} micro-batches; "
                "iterate step.microbatches() to its end and call step.backward(loss) for each"
            )
        self._member.train_state.casting.restore()
        try:
            reduced = self._finish(self._reducer)
            assert self._member.group is not None
            reduced = self._member.strategy.before_vote(reduced, self._member.group.read)
            self._member.wait_for_copies()
            self._vitals.enter("vote")
            self._vote(reduced, self._reducer.used)
        except PeerLost as error:
            self._member.collective_failed(error)
            raise StepCancelled from error

    def _finish(self, reducer: Reducer) -> Reduced:
        """The sums, once this rank has computed its part and the others theirs: on a device the
        host is ahead of both, and waits. Raises PeerLost."""
        time, group = self._vitals.device_time, self._member.group
        if time is None:
            self._end_passes()
            return reducer.finish()
        assert group is not None
        computed, reduced = time.end(), reducer.finish()
        summed = mark(self._member.device)
        wait_for(computed, lambda: self._vitals.device_waits(group.device_waits_in()))
        self._end_passes()
        if summed is not None:
            wait_for(summed, group.device_waits_in)
        return reduced

    def _end_passes(self) -> None:
        self._vitals.enter("reduce")
        self._vitals.end_step(self._member.load)

    def _vote(self, reduced: Reduced, used: Set[str]) -> None:
        """Commit what all agree on. Raises PeerLost; Repeated, which all ranks do."""
        session, member = self._session, self._member
        self._done.log_late(session._take_logged())
        assert member.group is not None
        buffers, read = member.train_state.buffers, member.group.read
        records = self._done.records(self._ids, buffers.integer_hashes(read), read)
        if session._spec.verify_every is not None:
            verify(member, session._spec.verify_every)
        ballot = Ballot(
            records=records,
            used=used,
            untracked=buffers.untracked_changes(),
            wants_pause=member.wants_pause,
            is_saving=member.saver.is_busy,
            wants_save=member.wants_save,
            magnitude=session._inspection.magnitude(reduced),
            timing=self._vitals.anatomy.timing(member.rank, member.world_size),
            logged=self._done.outside(read),
        )
        prepared, vote, vector = self._agree(reduced, ballot)
        self._is_agreed = True
        if not vote.is_finite:
            judge(session._inspection, vote, records, member)
        self._apply(prepared, vote, vector)
        measure(member, vote)
        if member.rank == 0:  # the others keep the step on record until the controller has it
            member.records.tell(member.machine.seat)
        self.committed = True
        self._vitals.enter("user")

    def _apply(self, prepared: Prepared, vote: Vote, vector: np.ndarray) -> None:
        """All hold the reduced gradients, so the step counts: take it, offer it to those who
        follow, and see whether the new state is to be saved. May raise PeerLost."""
        member, records, train_state = self._member, self._member.records, self._member.train_state
        self._vitals.enter("apply")
        update = Update.of(prepared, vote, train_state)
        records.add(update.step, prepared, vector, vote)
        member.followers.offer(update, lambda: records.known(is_newest_enough=True))
        member.strategy.apply(update)
        member.take_step(should_pause=vote.should_pause)
        member.backup.after_step(train_state, member)
        if not vote.is_saving:
            member.saver.after_step(train_state, member, is_asked=vote.should_save)

    def _roll_forward(self, prepared: Prepared, vote: CompletedVote) -> None:
        """The step counts although it was cancelled here: others have seen its vote complete."""
        layout, vector = replace(prepared.layout, log_names=vote.head.log_names), vote.vector()
        self._apply(replace(prepared, layout=layout), decode(layout, vector), vector)

    def _agree(self, reduced: Reduced, ballot: Ballot) -> tuple[Prepared, Vote, np.ndarray]:
        """The vote, again if a rank logs names that others do not know. A collective."""
        spec, member = self._session._spec, self._member
        train_state, group = member.train_state, member.group
        assert group is not None
        while True:
            layout = VoteLayout(
                world_size=group.size(),
                num_microbatches=spec.num_microbatches,
                micro_batch=spec.micro_batch,
                names=self._session._names,
                integer_buffers=train_state.buffers.integer_names,
                log_names=train_state.log_names,
            )
            took_s = time.perf_counter() - self._began
            prepared = Prepared(reduced, layout, took_s, member.generation, taken_with(train_state))
            member.prepare(partial(self._roll_forward, prepared))
            vector = add_up(group, encode(layout, ballot))
            vote = decode(layout, vector)
            if vote.untracked:  # all ranks see it: repeat the step with them
                member.drop_gradients()
                train_state.buffers.track(vote.untracked)
                raise Repeated
            if not vote.has_unknown_names:
                return prepared, vote, vector
            found = set(train_state.log_names).union(*gather_json(group, ballot.log_names))
            train_state.log_names = tuple(sorted(found))

    def _check_cancelled(self) -> None:
        if self._member.is_cancelled:
            raise StepCancelled
