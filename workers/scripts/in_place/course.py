"""One call of the script as it goes on through losses: `Course`.

It counts the operations that all members do alike, and after a loss asks the members that are left
where they are (call_state.py). How the group is replaced is workers/script_loop.py's, what is
reduced is unit.py's, and what is loaded is loader.py's.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, Protocol
from weakref import ReferenceType

import torch

from elastic.data.portions import Loss
from elastic.protocol.errors import CollectiveRefused, PeerLost, StepCancelled
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import Group
from workers.scripts.default_group import DefaultGroup
from workers.scripts.in_place import call_state, rule
from workers.scripts.in_place.applied import Applied, Recording
from workers.scripts.in_place.call_state import CallAgain, CallState, GoOn, InPass, judge
from workers.scripts.in_place.collective import OwnCollective, plain
from workers.scripts.in_place.unit import Attempt, send
from workers.train_state.learning_rate import learning_rate

log = logging.getLogger(__name__)

CALLED = {call_state.UNIT: "backward()", call_state.BARRIER: "torch.distributed's barrier"}
"""What the script has called; other operations are within a call that says its own name."""

REUSED = 8
"""Units in a row may be of the batches at hand, as those of several models are."""


class Regrouping(Recording, Protocol):
    """What a course asks of its call."""

    @property
    def has_changed(self) -> bool:
        """The group at hand is that of the members no more."""
        ...

    def regroup(self, error: PeerLost | None) -> Group | None:
        """The next generation's group, once it has formed; None: the script has ended on all ranks.
        error: what this rank has met, if it has met the loss itself."""
        ...

    def deny(self, why: str) -> None:
        """Have the script called again, and no call of it go on in place. Raises StepCancelled."""
        ...

    def say_level(self, level: int, reason: str) -> None:
        """Whether a loss can be survived in place, and why not."""
        ...

    def unwind(self) -> NoReturn:
        """The script is to be called again. Raises StepCancelled."""
        ...

    def end_unit(self) -> None:
        """Gradients have met."""
        ...

    def waited_for_data(self, seconds: float) -> None:
        """A loader of the script's took so long."""
        ...

    @property
    def how_it_grows(self) -> str:
        """When new ranks enter, in words."""
        ...


class Stands(Protocol):
    """A loader that deals."""

    @property
    def number(self) -> int: ...
    def stand(self) -> InPass: ...
    def lose(self, index: int, number: int, loss: Loss) -> None: ...
    @property
    def is_measured(self) -> bool: ...
    def begin_forward(self) -> bool: ...
    def measure(self) -> None: ...
    def take_back(self) -> None: ...
    def count(self, *, is_training: bool, members: Sequence[int]) -> int: ...


class Learns(Protocol):
    """A model whose gradients meet."""

    def add_samples(self, num: int, usual: float) -> None: ...
    def has_others(self) -> bool: ...


@dataclass(slots=True)
class Operations:
    """What all members of a call do alike, as far as this one is."""

    num_done: int = 0
    num_losses: int = 0
    """How often the members have regrouped."""
    members_before: tuple[int, ...] = ()
    """Until they have done it last."""
    doing: str = ""
    """One of call_state.py's; empty: none."""
    num_collectives: int = 0
    """Of the script's own, launched and not waited for."""
    result: Any = None
    """Of the one that has ended last: what who has missed its end is told."""
    ended: Attempt | None = None
    """The sums, if that was a unit."""
    receive: Callable[[Group, int], None] | None = None
    """Of the unit at hand: take the sums from this rank of a group."""
    sole: OwnCollective | None = None
    """Of the script's own, if it is the only one under way."""
    sums: str = "restart"
    """What becomes of a sum of the script's own without a lost rank's part: the script is called
    again, or it is the sum of the "survivors"."""
    samples: str = "restart"
    """Likewise of samples that come from no DataLoader."""

    def end(self, result: Any) -> None:
        """One has ended, here or where it was seen."""
        self.num_done += 1
        self.result, self.ended = result, None


@dataclass(slots=True)
class Training:
    """What has been seen of it."""

    has_begun: bool = False
    num_without_samples: int = REUSED
    """Units since the script had a batch of ours."""
    num_batches: int = 0
    """That the script has had."""
    has_rank: bool = False
    """The script has asked for its rank, or was told it at its start."""
    asks_for_rank: bool = False
    """It has done so in the middle of the training."""
    is_open: bool = False
    """A forward whose gradients have not met."""
    gathers: bool = False
    """In the middle of the training, by ranks."""
    is_refusal_heard: bool = False
    """By all members."""
    suspicion: str = ""
    """Will be a refusal if anything is trained."""
    orders: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Number of a loader, and a digest of its samples in order, which the others have not heard."""
    has_new_parameters: bool = False
    """Some module has got one, which may be of a model that had its own before."""


class Course:
    """Of one call, on one member."""

    def __init__(self, call: str, group: DefaultGroup, regrouping: Regrouping) -> None:
        """call: the same on all members and no other call's."""
        self.call, self.group = call, group
        self._regrouping = regrouping
        self.member = group.rank()
        """The rank that this member had when the call began: its name."""
        self.num_ranks = group.size()
        """When the call began."""
        self.members = tuple(range(self.num_ranks))
        """In the order of today's ranks."""
        self.seats = {(self.num_ranks, self.member)}
        """How many ranks a sampler may have been made for, and for which one of them."""
        self.models: list[ReferenceType[Learns]] = []
        self.loaders: list[Stands] = []
        self.losses: dict[int, list[tuple[int, Loss]]] = {}
        """By loader, each with the pass in which it happened."""
        self.refusal = ""
        """Why this call cannot go on in place; empty: it can."""
        self.training = Training()
        self.operations = Operations()
        self.applied = Applied(group, regrouping)
        self._has_ended = False
        """The script is to be called again, also if it has caught what told it so."""

    @property
    def sums_survivors(self) -> bool:
        """A sum of the script's own may be without a lost rank's part."""
        return self.operations.sums == "survivors"

    @property
    def num_models(self) -> int:
        """That the script has now."""
        return sum(model() is not None for model in self.models)

    @property
    def has_news(self) -> bool:
        """A refusal that the others have not heard, or the order of a pass."""
        has_any = bool(self.refusal) or bool(self.training.orders)
        return has_any and not self.training.is_refusal_heard

    def refuse(self, why: str) -> None:
        """From now on a loss has the script called again. The others hear it with the next unit."""
        if not self.refusal:
            self.refusal = why
            self._regrouping.say_level(0, why)

    def deny(self, why: str) -> None:
        """What the script wants now cannot be had in place: it is called again at level 0."""
        self._regrouping.deny(why)

    def suspect(self, why: str) -> None:
        """It is a refusal if a unit follows: what is only looked at may be loaded in any way."""
        self.training.suspicion = self.training.suspicion or why

    # --- samples ------------------------------------------------------------------------------
    def waited_for_data(self, seconds: float) -> None:
        self._regrouping.waited_for_data(seconds)

    def add_samples(self, num: int, usual: float) -> None:
        """The script has a batch. usual: as many as it would have of this iteration without a loss,
        the same on all members."""
        self.training.num_without_samples = 0
        self.training.num_batches += 1
        for model in self.models:
            if (learns := model()) is not None:
                learns.add_samples(num, usual)

    def note_order(self, number: int, digest: str) -> None:
        """Of the pass that a loader begins, to train: all members are to have the same one."""
        self.training.orders.append((number, digest))

    def begin_forward(self) -> None:
        """With gradients: what was delivered until now may be of the next unit."""
        self.training.is_open = True
        self.applied.begin()
        if self.training.has_new_parameters:
            self.training.has_new_parameters = False
            if any(m.has_others() for model in self.models if (m := model()) is not None):
                self.refuse(rule.NEW_PARAMETERS.why)
        if not any([loader.begin_forward() for loader in self.loaders]):
            for loader in self.loaders:
                loader.take_back()

    def measure(self) -> None:
        """A forward without gradients: the newest batch is not trained on, so far."""
        for loader in self.loaders:
            loader.measure()

    def end_unit(self, size: int, num_refusing: int) -> None:
        """What was delivered before its forward has counted, the part of every member. size: so
        many have had one. num_refusing: members that have news."""
        self._regrouping.end_unit()
        has_all = size == len(self.members)
        members = self.members if has_all else self.operations.members_before
        used = [loader.count(is_training=True, members=members) for loader in self.loaders]
        self.applied.end_unit(sum(used))
        training = self.training
        training.is_open = False
        training.num_without_samples += 1
        if training.num_without_samples > REUSED and self.operations.samples != "survivors":
            self.suspect(rule.ELSEWHERE.why)
        if num_refusing and not training.is_refusal_heard:
            self._hear_news()
        if training.suspicion:
            if len(self.members) < self.num_ranks:
                self.deny(f"{training.suspicion}, and a rank is lost")
            self.refuse(training.suspicion)
        elif not training.has_begun:
            training.has_begun = True
            if not self.refusal:
                self._regrouping.say_level(1, "")

    def _hear_news(self) -> None:
        """All members do; from then on a refusal is everybody's."""
        orders, self.training.orders = self.training.orders, []
        said = self.exchange([self.refusal, orders])
        known: dict[int, str] = {}
        for _, of_member in said.values():
            if any(known.setdefault(number, order) != order for number, order in of_member):
                self.suspect(rule.OTHER_ORDER.why)
        found = [f"rank {member}: {why}" for member, (why, _) in said.items() if why]
        if found:  # else whoever has refused is lost
            self.training.is_refusal_heard = True
            self.refuse(found[0])

    # --- operations ---------------------------------------------------------------------------
    def check(self) -> None:
        """Before anything that all members do: the members are those of the group. StepCancelled
        if the script is to be called again."""
        if self._has_ended:
            self._regrouping.unwind()
        if self._regrouping.has_changed:
            self._recover(None)

    def do(self, what: str, attempt: Callable[[], Any]) -> None:
        """The same operation on all members, again after a loss. `operations.result` is what
        attempt gives here or, if this member has missed its end, where it was seen."""
        self.check()
        now = self.operations
        if now.num_collectives:
            self.refuse(rule.IN_FLIGHT.why)
        now.doing, number = what, now.num_done
        with self.group.waiting(CALLED.get(what, what)):
            while now.num_done == number:
                try:
                    found = attempt()
                except PeerLost as error:
                    self._recover(error)
                else:
                    now.end(found)
        now.doing, now.receive = "", None

    def exchange(self, value: Any) -> dict[int, Any]:
        """The JSON values of all members, by their names in the order of ranks."""
        mine = [self.member, value]
        self.do(call_state.EXCHANGE, lambda: gather_json(self.group.inner, mine))
        return dict(self.operations.result)

    def barrier(self) -> None:
        self.do(call_state.BARRIER, lambda: self.group.inner.barrier().wait())

    def commit(self, attempt: Callable[[], None]) -> None:
        """The engine's own step, whose vote it rolls forward itself."""
        self.applied.tell()
        now = self.operations
        now.doing, number = call_state.COMMIT, now.num_done
        while now.num_done == number:
            try:
                attempt()
            except StepCancelled:
                self._recover(None)
            else:
                now.end(now.result)
        now.doing = ""

    def count_commit(self) -> None:
        """The step of the engine that was open counts, although it was cancelled here."""
        self.operations.end(self.operations.result)

    def hear_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        if self.operations.doing != call_state.COMMIT:  # the engine's own
            self.applied.hear_step(learning_rate(optimizer))

    def hear_rank_asked(self) -> None:
        """The script asks for its rank, which may be another one after a loss."""
        self.training.has_rank = True
        self.training.asks_for_rank |= self.training.has_begun

    def begin_collective(self, own: OwnCollective, *, is_by_rank: bool) -> None:
        """One of the script's own is launched. Of several that are under way together none is
        mended. is_by_rank: who reads the result asks whose is which."""
        before = self.members
        self.check()
        if self.members != before and (is_by_rank or self._has_moved(own.source, before)):
            self.deny(rule.OTHER_RANKS.why)
        training = self.training
        is_training = training.is_open or (training.has_begun and torch.is_grad_enabled())
        training.gathers |= is_by_rank and is_training
        self.operations.num_collectives += 1
        self.operations.sole = own if self.operations.num_collectives == 1 else None

    def _has_moved(self, source: int, before: tuple[int, ...]) -> bool:
        """source: a member, or -1. Whether the rank that it had is another one's, or nobody's."""
        if source < 0:
            return False
        rank = before.index(source)
        return rank >= len(self.members) or self.members[rank] != source

    def drop_collective(self) -> None:
        """It was not launched: what the script has asked for is none."""
        self.operations.num_collectives -= 1
        self.operations.sole = None

    def end_collective(self, own: OwnCollective) -> None:
        now = self.operations
        now.num_collectives -= 1
        now.end(own.result() if self.operations.sole is own else None)
        self._count_measured()

    def _count_measured(self) -> None:
        """What was measured over a pass's samples has met."""
        self.operations.sole = None
        is_measuring = not torch.is_grad_enabled()
        for loader in self.loaders:
            if is_measuring or loader.is_measured:
                loader.count(is_training=False, members=self.members)

    def mend_collective(self, error: PeerLost, own: OwnCollective) -> bool:
        """True: it has its result; False: it is to be launched again, over the members that are
        left. StepCancelled: the script is to be called again."""
        number = self.operations.num_done
        self._recover(error)
        if self.operations.sole is not own:
            self._end()
        if self.operations.num_done == number:
            own.restore()
            return False
        own.take(self.operations.result)
        self.operations.num_collectives = 0
        self._count_measured()
        return True

    def _end(self) -> NoReturn:
        self._has_ended = True
        self._regrouping.unwind()

    # --- losses -------------------------------------------------------------------------------
    def _recover(self, error: PeerLost | None) -> None:
        """The group is that of the members that are left. StepCancelled: the script is to be called
        again."""
        if isinstance(error, CollectiveRefused) and self.operations.num_losses:
            self.deny(rule.AFTER_A_LOSS.of(str(error)))
        while True:
            group = self._regrouping.regroup(error)
            if group is None:
                self._end()
            try:
                said = gather_json(group, {"call_state": asdict(self.stand())})
                self._follow([s.get("call_state") for s in said], group)
            except PeerLost as another:
                error = another
            else:
                return

    def stand(self) -> CallState:
        now = self.operations
        return CallState(
            call=self.call,
            member=self.member,
            members=self.members,
            num_losses=now.num_losses,
            num_done=now.num_done,
            doing=self._doing(),
            source=-1 if self.operations.sole is None else self.operations.sole.source,
            result=plain(now.result),
            passes=tuple(loader.stand() for loader in self.loaders),
            refusal=self.refusal
            or ("" if self.num_models else "no model is in DistributedDataParallel"),
            keeps_rank=self.training.has_rank and not self.training.asks_for_rank,
            gathers=self.training.gathers,
        )

    def _doing(self) -> str:
        if not self.operations.num_collectives:
            return self.operations.doing
        if self.operations.sole is None or not self.operations.sole.can_be_done_again:
            return call_state.COLLECTIVE
        return self.operations.sole.doing

    def _follow(self, said: list[dict[str, Any] | None], group: Group) -> None:
        """Raises PeerLost before anything has changed."""
        states = [CallState.of(s) if s else None for s in said]
        verdict = judge(self.num_ranks, states)
        if isinstance(verdict, CallAgain):
            log.warning('call=%s called again reason="%s"', self.call, verdict.why)
            self._end()
        self._level_units(verdict, states, group)
        for index, number, loss in verdict.losses:
            self.losses.setdefault(index, []).append((number, loss))
            for loader in self.loaders:
                loader.lose(index, number, loss)
        now = self.operations
        what = 'call=%s members=%s regrouped operations=%d doing="%s"'
        log.info(what, self.call, verdict.members, now.num_done, now.doing)
        now.members_before, self.members = self.members, verdict.members
        now.num_losses += 1
        self.group.replace(group)
        self.seats |= {(size, group.rank()) for size in (self.num_ranks, group.size())}
        if verdict.num_done > now.num_done:
            now.end(verdict.result)
        self.applied.go_on()
        self._warn_of_size()

    def _level_units(self, verdict: GoOn, said: Sequence[CallState | None], group: Group) -> None:
        """Who has missed the end of a unit gets its sums from who has seen it."""
        is_behind = [s is not None and s.num_done < verdict.num_done for s in said]
        if call_state.UNIT not in [s.doing for s in said if s and s.num_done < verdict.num_done]:
            return
        source, now = is_behind.index(False), self.operations
        if is_behind[group.rank()]:
            assert now.receive is not None
            now.receive(group, source)
        else:
            assert now.ended is not None
            send(group, now.ended, source)

    def _warn_of_size(self) -> None:
        """What a script has kept of the number of ranks nobody can see."""
        if self.group.rank() == 0:
            print(
                f"elastic: a rank is lost, and the script goes on in place with "
                f"{len(self.members)} of {self.num_ranks} ranks; "
                f"{self._regrouping.how_it_grows}. Whatever it has kept of "
                f"torch.distributed.get_world_size() is {self.num_ranks} still: a loss or a "
                "metric that is scaled by it is wrong from here on",
                file=sys.stderr,
                flush=True,
            )
