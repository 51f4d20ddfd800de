# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`Shard`: what `ray.train.get_dataset_shard(name)` gives, Ray's own `DataIterator` on our feed.

What users call is Ray's; where the rows come from, which of them are this rank's, and how far a
pass is, are ours.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from typing import Any, NoReturn, Protocol, TypeAlias

import ray
from ray.data import DataContext, DataIterator
from ray.data.block import (
    BlockAccessor,
    _apply_batch_format,  # pyright: ignore[reportPrivateUsage]
)
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
)

from elastic.data.dealt import ROWS_AT_ONCE, Deal, Rows, ahead
from elastic.data.passes import ALL, Answer, Block, CallOver, End, Found, Reading
from elastic.data.place import Place, Places
from elastic.data.portions import UNUSED, Behind, Portion, Spans, Standing, length
from elastic.data.rounds import LocalShuffle
from elastic.on_ray.feed.blocks import RayBlocks, in_format

log = logging.getLogger(__name__)
Item: TypeAlias = tuple[Any, Portion, int]
"""A batch, what it is of, and its rows; behind the last one there is none."""
POLL_S = 0.05
AGAIN_S = 3.0
"""A feed that is dead for good is started again after so long."""
NOT_SUPPORTED = "use iter_torch_batches() or iter_batches()"


class Feed(Protocol):
    """The run's (passes_actor.py), or a test's."""

    actor: Any
    """Its handle; each method gives a reference."""

    def start_again(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who reads."""

    call: int
    rank: int
    """When the call began."""
    ranks: int
    run: str
    """Of what local shuffles are drawn that have no seed: the same however often a run begins."""
    check: Callable[[], None]
    """Called now and then in the main thread; raises what ends the script's call."""
    course: "Course | None" = None
    """Of a call that goes on after losses."""


class Course(Protocol):
    """Who reads along, in a call that goes on after losses (workers/scripts/in_place/shards.py)."""

    @property
    def readers(self) -> tuple[int, ...]:
        """Who is left, in the order of today's ranks."""
        ...

    def begin_shared(self, row: int, missing: Spans, batch_size: int) -> "Pass":
        """A pass that all share, from its row on."""
        ...

    def refuse_unbatched(self) -> None:
        """A pass whose rows are not read in batches of a size is not dealt again."""
        ...


class Pass(Protocol):
    """Of those."""

    @property
    def standing(self) -> Standing: ...
    def ask(self) -> None:
        """The script asks for the next portion."""
        ...

    def deliver_share(self, portion: Portion) -> None:
        """The script is given it."""
        ...

    def end(self, portion: Portion) -> None:
        """It has had all. Raises what ends the call if a lost rank's rows have no place left."""
        ...


class Alone:
    """A pass that nobody goes on with after a loss."""

    def __init__(self, last: Portion) -> None:
        self.standing = Standing(last)

    def ask(self) -> None:
        pass

    def deliver_share(self, portion: Portion) -> None:
        self.standing.deliver(portion)
        self.standing.count(portion.iteration)

    def end(self, portion: Portion) -> None:
        self.standing.end = portion
        if num_rows := length(portion.missing):
            log.warning(UNUSED, num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a script wants its batches."""

    batch_size: int | None
    prefetch_batches: int = 1
    drop_last: bool = False
    is_row_by_row: bool = False
    buffer: int | None = None
    """Rows of local shuffle for each rank."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Passes:
    """As often as it is iterated over, a pass."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class Shard(DataIterator):
    """A rank's share of a data set, or all of it. Each iteration is a pass; the next one begins
    where `load_state_dict` says."""

    def __init__(
        self, name: str, feed: Feed, seat: Seat, places: Places, *, is_split: bool
    ) -> None:
        """places: of all shards of this call."""
        self._name, self._feed, self._places = name, feed, places
        self._is_split, self._seat = is_split, seat
        self._state: Place | None = None
        """Where the next pass is to begin; None: at its first row."""
        self._at_hand: tuple[int, Standing] | None = None
        """The number of the newest pass in batches, and how far that is."""
        self._num_rows = 0

    def __repr__(self) -> str:
        rank, ranks = self._place
        return f"Shard({self._name!r}, rank {rank} of {ranks})"

    @property
    def _readers(self) -> tuple[int, ...]:
        """Of the call, who is left."""
        course, seat = self._seat.course, self._seat
        return tuple(range(seat.ranks)) if course is None else course.readers

    @property
    def _place(self) -> tuple[int, int]:
        """The rank among those who share a pass, and how many they are."""
        if not self._is_split:
            return 0, 1
        return self._readers.index(self._seat.rank), len(self._readers)

    # --- where it is ------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """How far the pass at hand is, counting the batches that the script has been given; the
        same on all ranks that have been given as many."""
        return asdict(self._at())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration is the rest of the pass that `state` was in, whatever ranks there
        were. All ranks call it alike. ValueError for what `state_dict` has not given."""
        try:
            numbers = {key: int(v) for key, v in state.items() if key != "missing"}
            missing = tuple((int(a), int(b)) for a, b in state.get("missing", ()))
            self._state = Place(**numbers, missing=missing)
        except (TypeError, ValueError) as error:
            what = f"get_dataset_shard({self._name!r}).load_state_dict(): {state!r} is no state"
            raise ValueError(what) from error

    # --- what Ray's iterators ask -------------------------------------------------------------
    def _iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        _collate_fn: Callable[[Any], Any] | None = None,
        _finalize_fn: Callable[[Any], Any] | None = None,
    ) -> Any:
        wish = Wish(
            batch_size=batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            buffer=local_shuffle_buffer_size,
            seed=local_shuffle_seed,
        )
        check_wish(wish)
        form = partial(
            in_format,
            batch_format=_apply_batch_format(batch_format),
            collate=_collate_fn,
            finalize=_finalize_fn,
        )
        return Passes(partial(self._batches, wish, form))

    def _batches(self, wish: Wish, form: Callable[[Any], Any]) -> Iterator[Any]:
        for (batch, on_consume), _ in self._pass(wish, form):
            if on_consume is not None:
                on_consume()
            yield batch

    def iter_rows(self) -> Any:
        """As Ray's; a rank may have one row more than another."""
        wish = Wish(batch_size=ROWS_AT_ONCE, is_row_by_row=True)
        return Passes(partial(self._rows, wish))

    def _rows(self, wish: Wish) -> Iterator[Any]:
        place, first = None, 0
        for block, stop in self._pass(wish, lambda block: block):
            if place is None:
                place = self._places.of(self._name)
                first = place.row
            _, ranks = self._place
            for row in BlockAccessor.for_block(block).iter_rows(public_row_format=True):
                first = min(first + ranks, stop)
                self._places.move(self._name, place.number, first)
                yield row
            self._seat.check()

    def _to_ref_bundle_iterator(self) -> Any:
        """For `materialize`: this call's share of a pass."""
        from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry, RefBundle
        from ray.data._internal.stats import DatasetStats

        def bundles() -> Iterator[Any]:
            for block, _ in self._pass(Wish(batch_size=None), lambda block: block):
                accessor = BlockAccessor.for_block(block)
                stored: Any = ray.put(block)
                entry = BlockEntry(stored, accessor.get_metadata())
                yield RefBundle((entry,), schema=accessor.schema(), owns_blocks=False)

        return bundles(), DatasetStats(metadata={}, parent=None), None

    def schema(self) -> Any:
        reference = self._feed.actor.schema.remote(self._name)
        return waited_for(reference, self._seat.check)

    def stats(self) -> str:
        place, (rank, ranks) = self._at(), self._place
        return (
            f"Data set {self._name}, rank {rank} of {ranks}: {place.number} passes are "
            f"over, {self._num_rows} rows were given to this rank; the pass at hand is at row "
            f"{place.row}"
        )

    def get_context(self) -> DataContext:
        return DataContext.get_current()

    def iter_tf_batches(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"elastic does not support iter_tf_batches(): {NOT_SUPPORTED}")

    def iter_jax_batches(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"elastic does not support iter_jax_batches(): {NOT_SUPPORTED}")

    def to_tf(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"elastic does not support to_tf(): {NOT_SUPPORTED}")

    # --- a pass -------------------------------------------------------------------------------
    def _pass(self, wish: Wish, form: Callable[[Any], Any]) -> Iterator[tuple[Any, int]]:
        """Batches of a new pass, with the position behind the round of each."""
        seat = self._seat
        ranks = seat.ranks if self._is_split else 1
        place = self._places.begin(self._name, self._state, (wish.buffer or 0) * ranks)
        self._state = None
        at_hand = self._begun(wish, place)
        seed = wish.seed if wish.seed is not None else seed_of(seat.run, self._name)
        reader = ALL if self._is_split else seat.rank
        reading = partial(Reading, seat.call, self._name, reader, place.number)

        def dealt(behind: Behind, stay: Callable[[], None]) -> Iterator[Item]:
            shuffle = None
            if place.window:
                shuffle = LocalShuffle(
                    place.window, seed, place.number, lambda row: rows.ends_before(row)
                )
            deal = Deal(
                reader=seat.rank,
                ranks=ranks,
                batch_size=wish.batch_size,
                drop_last=wish.drop_last,
                is_row_by_row=wish.is_row_by_row,
                shuffle=shuffle,
            )
            of_rank = reading(deal.oldest_row(place.first), seat.rank, self._readers)
            needed = lambda: deal.oldest_row(at_hand.standing.needed)  # noqa: E731
            fetch = Fetch(self._feed, of_rank, needed, stay)
            rows = Rows(fetch, RayBlocks(), deal.oldest_row(behind.oldest))
            for block, portion in deal.batches(rows, behind):
                if block is None:
                    yield None, portion, 0
                else:
                    yield form(block), portion, BlockAccessor.for_block(block).num_rows()

        try:
            yield from self._given(wish, place, at_hand, dealt)
            self._places.end(self._name, place.number)
        finally:
            with suppress(Exception):  # it is gone with its run
                self._feed.actor.leave.remote(reading(place.first, seat.rank, self._readers))

    def _given(
        self,
        wish: Wish,
        place: Place,
        at_hand: Pass,
        dealt: Callable[[Behind, Callable[[], None]], Iterator[Item]],
    ) -> Iterator[tuple[Any, int]]:
        """What is dealt; anew after each loss, as what was ahead is of other shares."""
        seat, standing = self._seat, at_hand.standing
        while standing.end is None:
            num_losses = standing.num_losses
            # what asks ahead has ended before this rank leaves: else it would begin the pass again
            rest = partial(dealt, standing.behind)
            at_hand.ask()
            with closing(ahead(rest, wish.prefetch_batches, seat.check)) as batches:
                for batch, portion, num_rows in batches:
                    seat.check()
                    if standing.num_losses != num_losses:
                        break
                    if not portion.spans:
                        at_hand.end(portion)
                        break
                    self._num_rows += num_rows
                    at_hand.deliver_share(portion)
                    if not wish.is_row_by_row:
                        self._at_hand = place.number, standing
                    yield batch, portion.stop
                    at_hand.ask()

    def _at(self) -> Place:
        if self._at_hand is None:
            return self._places.of(self._name)
        number, standing = self._at_hand
        row, spans = standing.at
        missing = tuple((span.start, span.stop) for span in spans)
        self._places.move(self._name, number, row, missing)
        return self._places.of(self._name)

    def _begun(self, wish: Wish, place: Place) -> Pass:
        missing = tuple(range(*of) for of in place.missing)
        course = self._seat.course
        if not self._is_split:
            return Alone(Portion(-1, (), (self._seat.rank,), place.row, missing))
        if course is not None:
            if wish.batch_size is not None and not wish.is_row_by_row:
                return course.begin_shared(place.row, missing, wish.batch_size)
            course.refuse_unbatched()
        return Alone(Portion(-1, (), self._readers, place.row, missing))


class Fetch:
    """The blocks of one pass, in order; the next ones are asked for ahead."""

    def __init__(
        self,
        feed: Feed,
        reading: Reading,
        needed: Callable[[], int],
        stay: Callable[[], None],
    ) -> None:
        """needed: whoever is lost next, what lies before this row is of no use."""
        self._feed, self._reading, self._needed, self._stay = feed, reading, needed, stay
        self._asked: tuple[int, Any] | None = None

    def __call__(self, row: int) -> Found:
        """Raises what the execution of the data set raises."""
        lost: int | None = None
        while True:
            answer = self._answer(row, lost)
            if isinstance(answer.found, End):
                return answer.found
            try:
                references = [block.piece.block for block in answer.found]
                values = waited_for(references, self._stay)
            except ObjectLostError:  # its owner or node is gone
                lost = answer.walk
                continue
            self._ask(answer.found[-1].stop, None)
            return [with_value(b, value) for b, value in zip(answer.found, values, strict=True)]

    def _answer(self, row: int, lost: int | None) -> Answer:
        while True:
            if self._asked is None or self._asked[0] != row:
                self._ask(row, lost)
            assert self._asked is not None
            reference, self._asked = self._asked[1], None
            try:
                return waited_for(reference, self._stay)
            except ActorDiedError:  # Ray has given it up, or the run is over and this rank is next
                pause(self._stay, AGAIN_S)
                self._feed.start_again()
            except (RayActorError, ObjectLostError):  # it is started again
                pause(self._stay)
            except RayTaskError as error:
                if not isinstance(error.cause, CallOver):
                    raise
                while True:  # which this rank is about to hear
                    pause(self._stay)

    def _ask(self, row: int, lost: int | None) -> None:
        self._asked = (
            row,
            self._feed.actor.blocks_at.remote(self._reading, row, lost, self._needed()),
        )


def with_value(block: Block, value: Any) -> Block:
    return Block(block.first, block.piece._replace(block=value))


def pause(stay: Callable[[], None], seconds: float = POLL_S) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(POLL_S)
        stay()


def waited_for(reference: Any, stay: Callable[[], None]) -> Any:
    while True:
        try:
            return ray.get(reference, timeout=POLL_S)
        except GetTimeoutError:
            stay()


def check_wish(wish: Wish) -> None:
    """ValueError, as Ray has it."""
    if wish.batch_size is not None and wish.batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {wish.batch_size}")
    if wish.prefetch_batches < 0:
        raise ValueError(f"prefetch_batches must be at least 0, got {wish.prefetch_batches}")
    if wish.buffer is not None and wish.buffer < 1:
        raise ValueError(f"local_shuffle_buffer_size must be at least 1, got {wish.buffer}")


def seed_of(*names: str) -> int:
    return int.from_bytes(sha256("/".join(names).encode()).digest()[:6], "big")
