"""Who may ask Ray's head and wait for its answer: a stopped head stops no event loop.

Checked from the source text: each function with such a call is listed with where it runs, and none
that is for a thread beside a loop is called on one.
"""

import ast
from collections.abc import Iterator

from tests.test_architecture import ROOT

WAITS = {
    "available_resources",
    "cluster_resources",
    "get",
    "get_actor",
    "get_draining_nodes",
    "init",
    "list_named_actors",
    "nodes",
    "wait",
}
"""Of Ray's functions; an actor that is made (`ray.remote(...)`) waits for the head, too."""
ELSEWHERE = {
    "on_ray/actors.py find_controller",  # a worker's thread
    "on_ray/actors.py see_gpus",  # a worker's thread; a dict is asked
    "on_ray/actors.py start_controller",  # the driver
    "on_ray/placement/autoscaling.py can_add_gpus",  # the driver
    "on_ray/placement/machines.py torches_on",
    "on_ray/feed/order.py end_when_alone",  # through find_actor: the feed's own loop
    "on_ray/feed/order.py note",  # the same
    "on_ray/feed/actor.py read_task",  # a task
    "on_ray/feed/start.py start_actor",  # a worker's thread
    "on_ray/feed/actor.py within_stores",  # the feed's own loop, at its start
    "on_ray/feed/actor.py FeedActor._open",  # a task is declared, nothing is made
    "on_ray/feed/client.py RayFeed._get",  # a worker's thread
    "on_ray/feed/client.py RayFeed._first_of",
    "on_ray/feed/client.py RayFeed._start_again",
    "on_ray/feed/passes_actor.py PassesFeed.start_again",  # the same
    "on_ray/feed/shard.py waited_for",
    "on_ray/driver/remote_faults.py join",  # a command's process
    "on_ray/driver/remote_faults.py signal_process",
    "on_ray/driver/packet_loss.py lose_packets",
    "on_ray/driver/placeholders.py Placeholders.hold",
    "on_ray/driver/placeholders.py Placeholders.total",
    "on_ray/driver/placeholders.py refuse_other_cluster",
    "on_ray/driver/remote_run.py ask_to_end",
    "on_ray/driver/remote_run.py controller_of",
    "on_ray/driver/remote_run.py answer_of",
    "on_ray/placement/drain.py drain_node",  # the same, or the thread of a worker's notice
}
DRIVER = "on_ray/driver/submission.py "
BESIDE_THE_LOOP = {
    "on_ray/actors.py find_workers",
    "on_ray/actors.py spawn_worker",
    "on_ray/actors.py start_rendezvous",
    "on_ray/placement/drain.py draining_nodes",
    "on_ray/feed/start.py end_feed",
    "on_ray/naming.py find_actor",
    "on_ray/backup/servers.py BackupServers._start",
    "on_ray/placement/machines.py machines",
    "on_ray/placement/waiting.py offer_now",  # in an executor
}
CALLERS = {
    "on_ray/actors.py ControllerActor.start_anew",  # in an executor
    "controller/supervisor.py Supervisor.spawn",  # in HeadCalls
    "controller/supervisor.py Supervisor.begin_rendezvous",  # in HeadCalls
    *BESIDE_THE_LOOP,
    *ELSEWHERE,
}
"""Who may call what is beside the loop: who is there himself, or in another process."""


def functions(tree: ast.AST, place: str = "") -> Iterator[tuple[str, list[ast.Call]]]:
    """Each function with the calls in it, those in functions within it included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            yield place + node.name, calls
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")


def all_functions() -> Iterator[tuple[str, list[ast.Call]]]:
    base = ROOT / "elastic"
    for path in sorted(base.rglob("*.py")):
        for name, calls in functions(ast.parse(path.read_text())):
            yield f"{path.relative_to(base)} {name}", calls


def waits_for_the_head(call: ast.Call) -> bool:
    asked = ast.unparse(call.func)
    of_ray = asked.startswith("ray.") and asked.rpartition(".")[2] in {*WAITS, "remote"}
    return of_ray or asked.endswith((".get_draining_nodes", ".drain_node"))


def test_who_waits_for_the_head_is_listed_with_where_it_runs():
    found = {place for place, calls in all_functions() if any(map(waits_for_the_head, calls))}
    found = {place for place in found if not place.startswith(DRIVER)}
    listed = ELSEWHERE | BESIDE_THE_LOOP | {"on_ray/driver/remote_faults.py drain"}
    assert found - listed == set(), "does it run on the controller's loop? See head_calls.py"


def test_nobody_on_a_loop_calls_what_waits_for_the_head():
    waiting = {place.rpartition(" ")[2].rpartition(".")[2] for place in BESIDE_THE_LOOP}
    waiting.add("start_anew")
    for place, calls in all_functions():
        called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
        if place not in CALLERS and not place.startswith(DRIVER):
            assert not called & waiting, f"{place}: through HeadCalls, or an executor"
