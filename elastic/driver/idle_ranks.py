"""Whether a run's micro-batches leave workers idle, in words: which number would not.

What members really wait for is measured (docs/running.md, `anatomy.jsonl`).
"""

from elastic.config import RunConfig


def idle_share(num_microbatches: int, num_replicas: int) -> float:
    """Of the time of all, if every micro-batch takes the same time: who has one less waits."""
    passes = -(-num_microbatches // num_replicas)
    return 1.0 - num_microbatches / (passes * num_replicas)


def idle_note(config: RunConfig) -> str:
    """One line, empty if nobody waits with the most workers that the run may have."""
    together = config.parallel.ranks_per_microbatch
    replicas, num = config.max_workers // together, config.num_microbatches
    if replicas < 1 or num % replicas == 0 or config.parallel.pp > 1:
        return ""  # what a pipeline leaves idle follows from its blocks, and its plan says it
    share = idle_share(num, replicas)
    return (
        f"V = {num} micro-batches over {replicas * together} workers leave them idle for "
        f"{100 * share:.0f} % of the time; {advice(config, replicas)}"
    )


def advice(config: RunConfig, replicas: int) -> str:
    """The nearest V that share out evenly, of the same global batch if there are any."""
    batch, num = config.global_batch, config.num_microbatches
    even = [v for v in range(replicas, batch + 1, replicas) if batch % v == 0]
    near = [*[v for v in even if v < num][-1:], *[v for v in even if v > num][:1]]
    if near:
        sizes = " or ".join(f"micro_batch={batch // v} (V = {v})" for v in near)
        return f"{sizes} would not"
    whole = replicas * config.micro_batch
    near = [batch // whole * whole, (batch // whole + 1) * whole]
    sizes = " or ".join(f"global_batch={b} (V = {b // config.micro_batch})" for b in near if b)
    return f"{sizes} would not"
