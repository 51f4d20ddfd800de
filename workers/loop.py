"""The training loop of a run that brings none of its own. A user's loop may replace it."""

from workers.session import Session


def fit(session: Session) -> None:
    """Train to `session.steps`, evaluating every `eval_every` steps where the workload can."""
    workload = session.workload
    eval_every = session.eval_every if hasattr(workload, "evaluate") else None
    while session.step < session.steps:
        with session.next_step() as step:
            for batch in step.microbatches():
                step.backward(workload.loss(session.model, batch))
            step.commit()
        if eval_every and step.committed and session.step % eval_every == 0:
            workload.evaluate(session)
