"""One-line bugs that somebody could write, and the tests that must find them: a check of the tests.

`make test-mutations` plants one after another in a copy of the tree. What each of them breaks is
its name; that their places still exist, tests/test_mutations.py looks at in every `make test`.
With --simulation those of the protocol are to be found by seeded runs alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("elastic", "workers", "tests")
TIMEOUT_S = 300
NUM_SEEDS = 2000
BY_SIMULATION = "--simulation"


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    """Must occur once."""
    new: str
    tests: str
    """Files, one of whose tests must fail."""
    is_of_protocol: bool = False
    """The simulation alone finds it as well, within NUM_SEEDS seeds."""


ADOPTION = "elastic/control/failover.py"
RECOVERY = "elastic/control/recovery.py"
CAPACITY = "elastic/control/scaling.py"
COMMITS = "elastic/on_ray/record/commits.py"
CLUSTER = "elastic/on_ray/cluster.py"
MACHINE = "workers/membership/machine.py"
STATE = "workers/membership/state.py"
NETWORK = "tests/control/test_network_simulation.py"
MEMBER = "workers/membership/member.py"
WORKER = "workers/worker.py"
SHARDS = "workers/parallel/shards.py"

MUTATIONS = (
    Mutation(
        "a run that shrinks keeps asking for workers that it does not want any more",
        "elastic/control/resizing.py",
        "    extra = tuple(outside[max(0, room) :])\n",
        "    extra = ()\n",
        "tests/control/test_resizing.py",
    ),
    Mutation(
        "a run that shrinks lets nobody leave while enough stay",
        CAPACITY,
        "if phase.done or (num_staying >= limits.max_workers and not leavers):",
        "if phase.done or num_staying >= limits.max_workers:",
        "tests/control/test_resizing.py",
    ),
    Mutation(
        "the end of another machine of the set is taken for this one's",
        "workers/health/spot.py",
        ' and self._name in event.get("Resources", ())',
        "",
        "tests/workers/test_spot.py",
    ),
    Mutation(
        "whoever follows a log again is told all of it again",
        "elastic/on_ray/driver/job_server.py",
        "if self._num_seen > self._num_told:",
        "if self._num_seen:",
        "tests/cli/test_submit.py",
    ),
    Mutation(
        "a vote is believed although its generation was given up",
        "workers/distributed/process_group.py",
        "        self.check()\n        return found\n",
        "        return found\n",
        "tests/workers/test_member.py",
    ),
    Mutation(
        "a new controller gives a generation's number again",
        ADOPTION,
        "generation=max([ledger.generation, *(s.generation for s in standings)]),",
        "generation=ledger.generation,",
        "tests/control/test_failover.py",
        is_of_protocol=True,
    ),
    Mutation(
        "a generation that begins behind the record leaves the record as it is",
        "elastic/on_ray/record/progress.py",
        "if is_first and not has_recorded and report.step < self.recorded_step:",
        "if is_first and not has_recorded and report.step < 0:",
        "tests/control/test_ray_cluster.py",
    ),
    Mutation(
        "gradients of a generation are taken for those of the next",
        MACHINE,
        "    state = replace(state, prepared_by=0)\n    return Outcome(state, (leave,",
        "    return Outcome(state, (leave,",
        "tests/workers/test_machine.py",
        is_of_protocol=True,
    ),
    Mutation(
        "a step that is not on record is said once only",
        "elastic/protocol/in_force.py",
        "    | r.Committed\n",
        "",
        "tests/control/test_in_force.py",
        is_of_protocol=True,
    ),
    Mutation(
        "a generation that is over is obeyed again over another connection",
        MACHINE,
        "case Form(generation) if generation <= state.seat.generation:",
        "case Form(generation) if generation < state.seat.generation:",
        "tests/workers/test_machine.py",
        is_of_protocol=True,
    ),
    Mutation(
        "a sharded state is gone on from although nobody can report the steps before it",
        "workers/resharding/assemble.py",
        'limit = min(step, said[0]["known"])',
        "limit = step",
        "tests/workers/test_assemble.py",
    ),
    Mutation(
        "saves outlive their generation",
        MEMBER,
        "        self.saver.give_up(form.generation - 1)\n",
        "",
        "tests/workers/test_member.py",
    ),
    Mutation(
        "an evaluation draws by rank",
        "workers/evaluation.py",
        "EVALUATION_SEED_SALT, member.train_state.step, i)",
        "EVALUATION_SEED_SALT, member.train_state.step, i + member.rank)",
        "tests/workers/test_evaluation_memory.py",
    ),
    Mutation(
        "what fails in a newcomer ends the run",
        CLUSTER,
        "        return self.has_formed and (record.is_unfit",
        "        return False and (record.is_unfit",
        "tests/control/test_ray_cluster.py",
    ),
    Mutation(
        "a new controller names a step that it has no vote for",
        ADOPTION,
        "proven = min(s.step for s in holding if s.step >= newest - 1)",
        "proven = max(s.step for s in holding if s.step >= newest - 1)",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "a new controller takes an old generation for the one at work",
        ADOPTION,
        "    newest = max((s.generation for s in holding), default=0)\n",
        "    newest = min((s.generation for s in holding), default=0)\n",
        "tests/control/test_failover.py tests/control/test_close_faults.py",
    ),
    Mutation(
        "two parts of a sharded state are given up while copies make up for one",
        ADOPTION,
        "newest.world_size - num_members) <= 1",
        "newest.world_size - num_members) <= 2",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "who is two steps behind counts as one step behind",
        RECOVERY,
        "camp.step == ledger.step - 1 and camp.prepared_by",
        "camp.step < ledger.step and camp.prepared_by",
        "tests/control/test_failed_generations.py",
    ),
    Mutation(
        "two generations' states of one step are taken for the same",
        RECOVERY,
        "if (camp.step, camp.origin) == newest)",
        "if camp.step == newest[0])",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "a checkpoint is published ahead of the record",
        "elastic/control/checkpointing.py",
        "is_early = save.step > ledger.recorded_step",
        "is_early = save.step > ledger.step",
        f"tests/control/test_sharded_transition.py {NETWORK}",
        is_of_protocol=True,
    ),
    Mutation(
        "who is prepared rolls forward without the vote",
        RECOVERY,
        "    if not ledger.has_vote:\n        return NOBODY\n",
        "",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "who has left with the newest state is forgotten",
        RECOVERY,
        "left = ledger.left if limits.is_whole and not usable else NOBODY",
        "left = NOBODY",
        "tests/control/test_drain.py",
    ),
    Mutation(
        "newcomers alone begin behind what storage has not taken yet",
        "elastic/on_ray/record/progress.py",
        "return self.recorded_step > 0 and not",
        "return self.recorded_step < 0 and not",
        "tests/control/test_ray_cluster.py",
    ),
    Mutation(
        "who has copied a step takes part in what others do after it",
        RECOVERY,
        "usable = usable - (phase.copied - phase.between - rollers)",
        "pass",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "the gradients of one generation become the step of another",
        RECOVERY,
        "camp.step == ledger.step - 1 and camp.prepared_by == ledger.origin",
        "camp.step == ledger.step - 1 and camp.prepared_by != UNPREPARED",
        "tests/control/test_failover.py",
    ),
    Mutation(
        "who holds another generation's state of the step joins with it",
        MACHINE,
        "if (state.step, state.origin) == (command.step, command.origin):",
        "if state.step == command.step:",
        "tests/workers/test_machine.py",
    ),
    Mutation(
        "who has no reduced gradient rolls forward",
        RECOVERY,
        "    prepared_by = event.prepared_by if event.is_prepared else UNPREPARED\n",
        "    prepared_by = event.origin\n",
        f"tests/control/test_losses.py {NETWORK}",
        is_of_protocol=True,
    ),
    Mutation(
        "losses after a notice count against the budget",
        RECOVERY,
        "failures = ledger.failures + len(lost - ledger.leaving)",
        "failures = ledger.failures + len(lost)",
        "tests/control/test_drain.py",
    ),
    Mutation(
        "the budget of losses begins anew with no step",
        "elastic/control/pool.py",
        "        failures=0,\n        in_vain=0,",
        "        in_vain=0,",
        "tests/control/test_losses.py",
    ),
    Mutation(
        "falls are forgotten when the step that they fell from is reached again",
        "elastic/control/pool.py",
        "ledger.falls if step <= ledger.fallen_from else 0",
        "ledger.falls if step < ledger.fallen_from else 0",
        "tests/control/test_losses.py",
    ),
    Mutation(
        "nobody gives a save up when those it is for should be gone",
        CAPACITY,
        "any(n.gone_at > at for n in",
        "any(n.gone_at > 0 for n in",
        "tests/control/test_drain.py",
    ),
    Mutation(
        "a sharded step is on record once one rank's copy of it is held",
        COMMITS,
        "safe = min(self._held.values())",
        "safe = max(self._held.values())",
        "tests/control/test_commits.py",
    ),
    Mutation(
        "a pause is not carried by the vote",
        "workers/step/vote.py",
        "        ballot.wants_pause,",
        "        0,",
        "tests/workers/test_member.py",
    ),
    Mutation(
        "a report of the generation that was just given up goes on record",
        COMMITS,
        "if generation <= self._given_up or",
        "if generation < self._given_up or",
        "tests/control/test_commits.py",
    ),
    Mutation(
        "an optimizer's state is tried by nobody before step 1",
        WORKER,
        "self._try_microbatch(newest, with_optimizer=True)",
        "self._try_microbatch(newest)",
        "tests/workers/test_worker_start.py",
    ),
    Mutation(
        "threads that the workload has set change the bits",
        WORKER,
        "        check_threads(spec, device)\n",
        "",
        "tests/workers/test_worker_start.py",
    ),
    Mutation(
        "the ranks' order is exchanged with the data",
        "workers/parallel/collectives.py",
        "self._group.control.all_gather_flat(orders, mine)",
        "self._group.all_gather_flat(orders, mine)",
        "tests/device/test_abandonment.py",
    ),
    Mutation(
        "what leaves a device is not ordered behind what made it",
        "workers/distributed/device_wait.py",
        "            self._stream.wait_event(self._from)\n",
        "",
        "tests/device/test_snapshots.py",
    ),
    Mutation(
        "a step does not wait for what leaves the device",
        "workers/train_state/snapshot.py",
        "                exit_.hold()\n",
        "                pass\n",
        "tests/device/test_snapshots.py",
    ),
    Mutation(
        "a device writes to memory of the host that is not pinned",
        "workers/distributed/device_wait.py",
        "staged = None if target.is_pinned() else torch.empty_like(target, pin_memory=True)",
        "staged = None",
        "tests/device/test_snapshots.py",
    ),
    Mutation(
        "NCCL's abort keeps whoever gives up, and its parts are aborted one by one",
        "workers/distributed/nccl.py",
        "            self._aborting.start()\n",
        "            self._aborting.run()\n",
        "tests/device/test_nccl_group.py",
    ),
    Mutation(
        "one look at the gradients for each micro-batch",
        "workers/reduction/bitwise.py",
        "        if self._may_overlap is None:\n            self._may_overlap",
        "        [g.isfinite().all().item() for g in gradients if g is not None]\n"
        "        if self._may_overlap is None:\n            self._may_overlap",
        "tests/device/test_snapshots.py",
    ),
    Mutation(
        "the norm that clips is exchanged behind the vote",
        "workers/parallel/sharded.py",
        "        self.train_state.apply(update, step_on_shards)\n",
        "        again = self.before_vote(Reduced(update.gradients, {}), self._group.read)\n"
        "        self.train_state.apply(replace(update, squares=again.squares), step_on_shards)\n",
        "tests/device/test_snapshots.py",
    ),
    Mutation(
        "a worker without memory for the state ends the run as the user's error",
        WORKER,
        "except (LoaderLost, OutOfMemory) as error:",
        "except LoaderLost as error:",
        "tests/workers/test_errors.py",
    ),
    Mutation(
        "on a device a batch becomes a plain dict",
        "workers/data/placement.py",
        "        whole.update(moved)\n        return whole\n",
        "        return moved\n",
        "tests/device/test_placement.py",
    ),
    Mutation(
        "an operation that races is only warned of",
        "workers/health/gpu.py",
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "tests/workers/test_worker_start.py",
    ),
    Mutation(
        "a GPU that computes wrongly is let in",
        "workers/health/preflight.py",
        "    if not (is_kept and is_right):\n",
        "    if not is_kept:\n",
        "tests/device/test_preflight.py",
    ),
    Mutation(
        "gradients of offloaded rows are added where they are, not where the sum is",
        "workers/parallel/hsdp.py",
        "part.reshape(-1).to(self._device)",
        "part.reshape(-1)",
        "tests/workers/test_offload.py",
    ),
    Mutation(
        "nobody waits for who is longer in getting its part",
        SHARDS,
        "            pieces.wait_for_all()\n",
        "",
        "tests/workers/test_pieces.py",
    ),
    Mutation(
        "ranks that read their parts do not meet on the way",
        SHARDS,
        "begin_piece=pieces.begin_apart)",
        "begin_piece=pieces.begin)",
        "tests/workers/test_pieces.py",
    ),
    Mutation(
        "ranks that make their initial weights do not meet on the way",
        SHARDS,
        "at, layout, values, pieces.begin_apart)\n",
        "at, layout, values, pieces.begin)\n",
        "tests/workers/test_pieces.py",
    ),
    Mutation(
        "a newcomer of a sharded run learns of no step that is not on record",
        MEMBER,
        "            self.records.share(self.group)\n",
        "",
        "tests/workers/test_entering.py",
    ),
    Mutation(
        "on record is what the lowest rank has heard of",
        MEMBER,
        "max(gather_json(self.group, self.link.recorded_step))",
        "gather_json(self.group, self.link.recorded_step)[0]",
        "tests/workers/test_entering.py",
    ),
    Mutation(
        "an older word makes a newcomer forget what its peers know to be on record",
        "workers/membership/link.py",
        "self.step = max(step, self._of_peers)",
        "self.step = step",
        "tests/workers/test_link_broken.py",
    ),
    Mutation(
        "what a worker knew before it fell back goes on record",
        MEMBER,
        "                self.records.forget()\n            case a.LoadState",
        "            case a.LoadState",
        "tests/workers/test_entering.py",
    ),
    Mutation(
        "no memory for a shard ends the run",
        MEMBER,
        'with told_as_loss("it got its part of the state")',
        "if True",
        "tests/workers/test_shortage.py",
    ),
    Mutation(
        "no memory to load the state ends the run",
        MEMBER,
        'with told_as_loss("it loaded the state")',
        "if True",
        "tests/workers/test_shortage.py",
    ),
    Mutation(
        "a part is reported although its generation is over",
        "workers/checkpoint/saver.py",
        "            if job.is_given_up:\n                raise _GivenUp\n            state",
        "            state",
        "tests/workers/test_untold_saves.py",
    ),
    Mutation(
        "a shard is saved as that of another rank",
        SHARDS,
        "        assert (held.world_size, held.position) ==",
        "        assert True or (held.world_size, held.position) ==",
        "tests/workers/test_untold_saves.py",
    ),
    Mutation(
        "who takes part in a generation that was given up goes on",
        STATE,
        "return isinstance(self.phase, Working) and not self.is_given_up",
        "return isinstance(self.phase, Working)",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "a generation that pauses at once cuts off what the loop is in",
        MACHINE,
        "return reach_boundary(state) if state.loop is Loop.OUTSIDE else Outcome(state)",
        "return reach_boundary(state)",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "a step is prepared, too, once it is committed",
        MACHINE,
        "state = replace(state, step=event.step, origin=state.prepared_by, prepared_by=0)",
        "state = replace(state, step=event.step, origin=state.prepared_by)",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "nobody repeats the steps that a lost lowest rank may not have said",
        MACHINE,
        "    if rank == 0:\n        said =",
        "    if rank < 0:\n        said =",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "who holds the reduced gradients does not say so",
        MACHINE,
        "prepared_by=state.prepared_by,\n",
        "prepared_by=0,\n",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "who is recalled answers for the generation that it was in",
        MACHINE,
        "        case Recall():\n            state = replace(state, seat=seat_in(command), source",
        "        case Recall():\n            state = replace(state, source",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "newcomers are taken in while members evaluate",
        RECOVERY,
        "    if event.is_between_steps:\n",
        "    if False:\n",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "newcomers are taken in with a step that they miss",
        CAPACITY,
        "is_closed = is_between_steps or bool(rollers and arrivals(ledger))",
        "is_closed = is_between_steps",
        NETWORK,
        is_of_protocol=True,
    ),
    Mutation(
        "a late word of joining takes a step off the record",
        COMMITS,
        "        if generation > self._given_up:  # whoever",
        "        if False:  # whoever",
        "tests/control/test_commits.py",
    ),
)


def lacks(mutation: Mutation) -> str:
    """Why it cannot be planted; empty if it can."""
    count = (ROOT / mutation.file).read_text().count(mutation.old)
    if count == 1:
        return ""
    return f"{mutation.file} has {mutation.old!r} {count} times; the mutation needs a new place"


PYTEST = ("pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
SIMULATION = ("tests.control.seeds", "0", str(NUM_SEEDS), "--first")


def plant(mutation: Mutation, tree: Path, *, by_simulation: bool) -> str:
    """Run its tests, or the simulation, in the mutated tree -> "found", or what happened."""
    path = tree / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    arguments = SIMULATION if by_simulation else (*PYTEST, *mutation.tests.split())
    timeout_s = TIMEOUT_S * 4 if by_simulation else TIMEOUT_S
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=timeout_s,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"not found within {timeout_s} s"
    finally:
        path.write_text(before)
    if by_simulation and done.returncode == 1 and done.stdout.startswith("seed "):
        return f"found, {done.stdout.splitlines()[0]}"
    if done.returncode == 1:  # a fixture's look at the device counts; a file that is no test is 2
        return "found"
    return "survived" if done.returncode == 0 else f"no test ran: {done.stdout[-500:]}"


def main() -> int:
    """The status is that of the tests: 0 if all were found."""
    by_simulation = BY_SIMULATION in sys.argv
    wanted = [word for word in sys.argv[1:] if word != BY_SIMULATION]
    chosen = [m for m in MUTATIONS if not wanted or any(word in m.name for word in wanted)]
    if by_simulation and not wanted:
        chosen = [m for m in MUTATIONS if m.is_of_protocol]
    num_missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutation in chosen:
            began = time.monotonic()
            outcome = lacks(mutation) or plant(mutation, tree, by_simulation=by_simulation)
            num_missed += not outcome.startswith("found")
            print(f"{time.monotonic() - began:6.1f} s  {mutation.name}: {outcome}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} mutations found")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
