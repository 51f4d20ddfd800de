"""`elastic run TARGET`: options to a RunConfig, the run, and what it came to.

What runs is elastic/driver/launch.py's; ray and torch are not imported before a run starts.
"""

import contextlib
import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from elastic.cli.outcome import print_failure, print_outcome
from elastic.cli.progress import Progress
from elastic.cli.run_options import configure
from elastic.config import RunConfig
from elastic.driver.starting import be_silent, slow_step, tell
from elastic.driver.target import load_target, parse_arguments
from elastic.store.files import encode
from elastic.store.run_directory import RESULT_FIELDS

if TYPE_CHECKING:
    from elastic.driver.launch import Result

FAILED = 1


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:Class or path/to/file.py:Class, a Workload; relative paths in it "
            "are relative to its folder. Or a job file, elastic.yaml, that tells it and options. "
            "Or a script.py that calls Ray Train's fit(), followed by its own arguments only; "
            "before it `--script-level 0`, if a loss is to call it again.",
        ),
    ],
    *,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run.")],
    global_batch: Annotated[int, typer.Option(help="Samples per step, for any worker count.")],
    micro_batch: Annotated[int, typer.Option(help="Samples per forward, divides global batch.")],
    workers: Annotated[str, typer.Option(help="A number, or MIN..MAX to be elastic.")] = "1",
    parallel: Annotated[
        str,
        typer.Option(
            help="ddp, fsdp, fsdp-grad-op, hsdp:S (S ranks in a replica), pp:S (S stages of a "
            "pipeline); package.module:function: "
            "a strategy of your own."
        ),
    ] = "ddp",
    reduction: Annotated[
        str, typer.Option(help="fast, or bitwise: weights equal for every history.")
    ] = "fast",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    clip_norm: Annotated[float | None, typer.Option(help="Clip the gradient norm.")] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Recompute blocks in the backward.")
    ] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Shards in host memory.")] = False,
    seed: Annotated[int, typer.Option(help="Weights, sample order, randomness.")] = 0,
    storage: Annotated[
        str | None,
        typer.Option(help="Folder or URI of the runs; without it a temporary folder."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's folder in storage; the same again resumes it.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints, besides every 10 minutes and the end."),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            metavar="LAST[,EVERY]", help="Checkpoints to keep: the last so many, and every so many."
        ),
    ] = "2",
    on_storage_error: Annotated[
        str, typer.Option(help="warn: train on and say so at the end; or fail.")
    ] = "warn",
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    snapshot_every: Annotated[
        int, typer.Option(help="Steps between copies of the shards in peer memory.")
    ] = 1,
    standby: Annotated[int, typer.Option(help="Warm workers that wait for a loss.")] = 0,
    detect_s: Annotated[
        str, typer.Option(help="Seconds of silence until a worker counts as hung, or none.")
    ] = "3.0",
    max_failures: Annotated[
        int, typer.Option(help="Workers that may be lost since the last committed step.")
    ] = 8,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, which waits for GPUs.")] = "auto",
    cpus_per_worker: Annotated[int, typer.Option(help="CPU slots and threads of each.")] = 1,
    numa_binding: Annotated[
        str, typer.Option(help="node: a worker runs on the CPUs near its GPU; or none.")
    ] = "node",
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE[;...]",
            help="Nodes for workers by Ray's labels, and behind a semicolon where else.",
        ),
    ] = None,
    accelerator_type: Annotated[
        str | None, typer.Option(help="Of each worker's node, as Ray calls it: A100.")
    ] = None,
    worker_resources: Annotated[
        str | None,
        typer.Option(metavar="NAME=AMOUNT", help="Further resources of Ray's for each worker."),
    ] = None,
    spot: Annotated[
        str | None,
        typer.Option(help="Heed the cloud's notices that a machine goes: aws, gcp, azure, auto."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster; without it one that is found, else Ray starts embedded."),
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of FaultPolicy, say verify_every=100."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Constructor argument; a Python literal or a string."
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run is there; it goes on (see watch).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line on stdout is result.json; no progress.")
    ] = False,
) -> int:
    """Train TARGET. Exit status: 0 succeeded, 1 failed or stopped, 2 wrong input."""
    options: dict[str, Any] = {
        "workers": workers,
        "steps": steps,
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "parallel": parallel,
        "reduction": reduction,
        "precision": precision,
        "clip_norm": clip_norm,
        "activation_checkpointing": activation_checkpointing,
        "offload": offload,
        "seed": seed,
        "storage": storage,
        "name": name,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "eval_every": eval_every,
        "snapshot_every": snapshot_every,
        "on_storage_error": on_storage_error,
        "standby": standby,
        "detect_s": detect_s,
        "max_failures": max_failures,
        "device": device,
        "cpus_per_worker": cpus_per_worker,
        "numa_binding": numa_binding,
        "labels": labels,
        "accelerator_type": accelerator_type,
        "worker_resources": worker_resources,
        "spot": spot,
        "address": address,
        "faults": faults,
    }
    config = configure(options)
    arguments = parse_arguments(settings or ())
    with only_result_on_stdout() if as_json else contextlib.nullcontext():
        result, status = train(config, target, arguments, detach=detach, is_silent=as_json)
    if as_json:
        print(result_line(result).decode(), flush=True)
    else:
        print_outcome(asdict(result), result.run_directory, steps)
    return status


def train(
    config: RunConfig, text: str, arguments: dict[str, Any], *, detach: bool, is_silent: bool
) -> "tuple[Result, int]":
    """Run it; what it came to, and the exit status."""
    with slow_step(f"importing {text}", be_silent if is_silent else tell):
        target = load_target(text, arguments)
    from elastic.driver.launch import (  # here, so that bad input never imports ray
        RunFailed,
        run_config,
    )

    progress = None if is_silent or detach else Progress(Console(), since=time.time())
    try:
        result = run_config(
            target.workload,
            config,
            target=target.spelled,
            arguments=arguments,
            folder=target.folder,
            module=target.module,
            source=target.source,
            on_progress=progress or ignore_progress,
            detach=detach,
            is_silent=is_silent,
        )
    except RunFailed as failure:
        if progress is not None:
            progress.close()
        print_failure(failure, target.folder)
        return failure.result, FAILED
    finally:
        if progress is not None:
            progress.close()
    return result, 0 if result.outcome in ("succeeded", "detached") else FAILED


def ignore_progress(run_directory: str) -> None:
    """Nobody looks."""


@contextlib.contextmanager
def only_result_on_stdout() -> Generator[None]:
    """Whatever prints meanwhile, libraries and child processes too, goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def result_line(result: "Result") -> bytes:
    """The content of result.json; a detached run has none yet, only a place."""
    values = asdict(result)
    if result.outcome == "detached":
        return encode({"outcome": "detached", "run_directory": result.run_directory})
    return encode({name: value for name, value in values.items() if name in RESULT_FIELDS})
