"""Checkpoints: a save belongs to one generation and step, and is published once it is whole.

Who writes is workers/checkpoint/saver.py, who publishes is elastic/store/catalogue.py.
"""

from dataclasses import replace

from elastic.control.commands import Checkpoint, Command, Discard, Publish
from elastic.control.events import PartFailed, PartSaved
from elastic.control.state import Active, Decision, Ledger, Limits, Running, Save


def count_from(ledger: Ledger, at: float, limits: Limits) -> Ledger:
    """There is nothing older to lose: the run begins, or its checkpoint is published."""
    return ledger if limits.save_every_s is None else ledger.with_saves(published_at=at)


def ask_to_save(decision: Decision, at: float, limits: Limits) -> Decision:
    """A step was committed: how much a fall back to the last checkpoint costs has a bound."""
    ledger, phase = decision.ledger, decision.phase
    if limits.save_every_s is None or not isinstance(phase, Running):
        return decision
    since = max(ledger.saves.published_at, ledger.saves.asked_at)
    if at - since < limits.save_every_s or ledger.step >= limits.steps:
        return decision
    command = Checkpoint(phase.membership, ledger.step)
    reason = f"no checkpoint for {limits.save_every_s:g} s: the next step is saved"
    ledger = ledger.with_saves(asked_at=at)
    return Decision(ledger, phase, (*decision.commands, command), decision.reason or reason)


def hear_part(ledger: Ledger, phase: Active, event: PartSaved, limits: Limits) -> Decision:
    """A rank's part is durable; with the last one the checkpoint is."""
    if is_overtaken(ledger, event):
        discard = Discard(event.generation, event.step)
        return Decision(ledger, phase, (discard,), "a save was overtaken by the next one")
    ledger, dropped = save_of(ledger, event)
    save = ledger.saves.current
    ledger = ledger.with_saves(current=replace(save, saved=save.saved.add(event.rank)))
    saved = Decision(ledger, phase, dropped, reason_of(dropped))
    return publish_if_whole(saved, event.at, limits)


def publish_if_whole(decision: Decision, at: float, limits: Limits) -> Decision:
    """All parts are durable, and the step is on record, which may come later: with peer memory, or
    over another connection."""
    ledger, phase = decision.ledger, decision.phase
    save = ledger.saves.current
    assert isinstance(phase, Active)
    world_size = phase.membership.world_size
    is_early = save.step > ledger.recorded_step
    if save.has_failed or is_early or len(save.saved) < world_size:
        return decision
    publish = Publish(save.generation, save.step)
    reason = f"all {world_size} parts of the checkpoint of step {save.step} are durable"
    ledger = count_from(ledger.with_saves(current=Save()), at, limits)
    return Decision(ledger, phase, (*decision.commands, publish), reason)


def hear_failed_part(ledger: Ledger, phase: Active, event: PartFailed) -> Decision:
    """A checkpoint that will not be whole; training goes on, unless `Limits.must_save`."""
    if is_overtaken(ledger, event):
        return Decision(ledger, phase)
    ledger, dropped = save_of(ledger, event)
    save = ledger.saves.current
    if save.has_failed:
        return Decision(ledger, phase)
    ledger = ledger.with_saves(current=replace(save, has_failed=True))
    discard = Discard(save.generation, save.step)
    reason = f"the checkpoint of step {save.step} failed at rank {event.rank}: {event.message}"
    return Decision(ledger, phase, (*dropped, discard), reason)


def has_failed(ledger: Ledger) -> bool:
    """Of the step where the run stands."""
    save = ledger.saves.current
    return save.has_failed and save.step == ledger.step


def is_overtaken(ledger: Ledger, event: PartSaved | PartFailed) -> bool:
    """A faster rank writes the next one already; both at once would never be whole."""
    save = ledger.saves.current
    return save.generation == event.generation and event.step < save.step


def save_of(ledger: Ledger, event: PartSaved | PartFailed) -> tuple[Ledger, tuple[Command, ...]]:
    """The save that `event` is about; an older one that is not whole is dropped for it."""
    save = ledger.saves.current
    if (save.generation, save.step) == (event.generation, event.step):
        return ledger, ()
    ledger, dropped = drop_save(ledger)
    return ledger.with_saves(current=Save(event.generation, event.step)), dropped


def drop_save(ledger: Ledger) -> tuple[Ledger, tuple[Command, ...]]:
    """The generation that was writing is over."""
    save = ledger.saves.current
    discard = (Discard(save.generation, save.step),) if save.generation else ()
    return ledger.with_saves(current=Save()), () if save.has_failed else discard


def reason_of(dropped: tuple[Command, ...]) -> str:
    return "a save was overtaken by the next one" if dropped else ""
