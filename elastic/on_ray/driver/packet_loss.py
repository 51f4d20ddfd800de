# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Packets between one node of the cluster and the others are lost for a while: by iptables there.

It needs root on that node. Other traffic of the node, such as a shell on it, is left alone.
"""

import secrets
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.on_ray.driver.remote_faults import asking
from elastic.on_ray.placement.machines import machines
from elastic.protocol.errors import WrongInput

ANSWER_S = 30.0
DELAY_S = 0.5
"""Between the node's answer and the loss, which would take the answer, too."""
ALL = 1.0
Command = list[str]


def lose_packets(node_id: str, loss: float, for_s: float) -> float:
    """The part `loss` of the packets from and to the cluster's other hosts, in `for_s`; the Unix
    time there when it begins. The node undoes it by itself.

    WrongInput if there is no other host, or the node cannot be asked; OSError with what iptables
    says there.
    """
    there = machines()
    own = next((m.ip for m in there if m.node_id == node_id), None)
    others = sorted({m.ip for m in there} - {own})
    if own is None:
        raise WrongInput(f"node {node_id} is gone already")
    if not others:
        raise WrongInput(f"every node of the cluster is on the host {own}: it has no link to lose")
    where: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(lose_here)
    with asking(node_id):
        return float(ray.get(task.remote(others, loss, for_s), timeout=ANSWER_S))


def lose_here(addresses: Sequence[str], loss: float, for_s: float) -> float:
    """On the node itself; the Unix time when it begins. OSError if iptables cannot do it."""
    chain = f"elastic-chaos-{secrets.token_hex(4)}"
    tool = "ip6tables" if ":" in addresses[0] else "iptables"
    make, begin, end = rules(tool, chain, addresses, loss)
    try:
        for command in make:
            call(command)
    except OSError:
        with suppress(OSError):
            for command in end[-2:]:  # what was made of the chain
                call(command)
        raise
    words = [f"sleep {DELAY_S}", *map(shlex.join, begin), f"sleep {for_s:g}", *map(shlex.join, end)]
    # nobody's child: it must outlive this process and its raylet, which may end of the cut
    script = f"({'; '.join(words)}) </dev/null >/dev/null 2>&1 &"
    subprocess.run(["/bin/sh", "-c", script], check=True, start_new_session=True)
    return time.time() + DELAY_S


def rules(
    tool: str, chain: str, addresses: Sequence[str], loss: float
) -> tuple[list[Command], list[Command], list[Command]]:
    """-> what makes a chain of rules, what puts it to use, and what takes both away again."""
    run = [tool, "-w"]
    part = ["-m", "statistic", "--mode", "random", "--probability", f"{loss:g}"]
    drop = [*(part if loss < ALL else []), "-j", "DROP"]
    make = [[*run, "-N", chain]]
    make += [[*run, "-A", chain, end, a, *drop] for a in addresses for end in ("-s", "-d")]
    ways = ("INPUT", "OUTPUT")
    begin = [[*run, "-I", way, "-j", chain] for way in ways]
    end = [[*run, "-D", way, "-j", chain] for way in ways]
    return make, begin, [*end, [*run, "-F", chain], [*run, "-X", chain]]


def call(command: Command) -> None:
    """OSError with what it says if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S / 2)
    except FileNotFoundError:
        raise OSError(f"{command[0]} is not installed there") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer there") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise OSError(f"{command[0]} refuses, which needs root there: {said}")
