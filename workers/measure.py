"""Where the time of a committed step went, on record now and then.

What is measured is workers/health's; the lines go to the controller, which writes anatomy.jsonl.
"""

from functools import partial

from elastic.protocol.messages.to_controller import Measured
from workers.health.gpu import peak_memory
from workers.membership.member import Member
from workers.step.vote import Vote


def measure(member: Member, vote: Vote) -> None:
    """The step is over."""
    anatomy = member.vitals.anatomy
    peak = partial(peak_memory, member.device)
    step_s = anatomy.end(vote.pace, member.step, member.rank, peak)
    member.records.complete(member.step, step_s, is_staged=bool(member.mesh.cuts))
    if rows := anatomy.take():
        member.link.send(Measured(rows))
