"""The training loop of a run that brings none of its own. A user's loop may replace it."""

from workers.session import Session


def fit(session: Session) -> None:
    """Train to `session.steps`, evaluating every `eval_every` steps where the workload can."""
    workload = session.workload
    can_evaluate = session.eval_every is not None and hasattr(workload, "evaluate")
    while session.step < session.steps:
        with session.next_step() as step:
            for batch in step.microbatches():
                step.backward(workload.loss(session.model, batch))
            step.commit()
        if can_evaluate and step.committed and session.step % session.eval_every == 0:
            workload.evaluate(session)
