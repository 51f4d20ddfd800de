"""What the faults of a run cost: its journal, metrics and chaos.jsonl as one JSON value.

Pure functions over what was read; the page with pictures is page.py's.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from elastic.chaos.record import Done, read_done
from elastic.chaos.timeline import PRODUCTIVE, WAITING, Episode, Timeline, follow
from elastic.control.events import WorkerLost
from elastic.control.replay import JOURNAL_TYPES, Entry, Started
from elastic.protocol.encoding import decode
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.store.files import Folder, Kinds, read_json
from elastic.store.journal import read_lines, read_records
from elastic.store.run_directory import ROLLED_BACK

ABOUT = ("at", "scenario", "for_s")
"""Fields of a fault that have no column of their own."""
NOTICED = 10
"""A loss more than so many times `detect_s` after a fault has another cause."""
METRICS_KINDS: Kinds = {"step": int, "time": float, "loss": float | int | None}
CLOCKS_S = 0.02
"""A loss may seem to precede its fault by so much: another process read the clock."""


@dataclass(frozen=True, slots=True)
class Story:
    """A run as its files tell it."""

    name: str
    timeline: Timeline
    metrics: list[dict[str, Any]]
    rolled_back: list[dict[str, Any]]
    """Lines of metrics.jsonl that the run fell back behind."""
    done: list[Done]
    detect_s: float | None = None
    is_script: bool = False
    """Its metrics are of its optimizers' steps; the journal knows its reports alone."""


def read_story(folder: Folder) -> Story:
    """WrongInput if there is no journal. A decision takes the types of its event's fields for
    granted: a journal that is damaged, or of another version, raises whatever that makes of it."""
    lines = read_lines(folder, "journal.jsonl")
    entries = [line["entry"] for line in lines if "entry" in line]
    if not entries:
        raise WrongInput(f"{folder} has no decision in its journal yet: nothing to report")
    parts: list[list[Started | Entry]] = []
    for entry in entries:
        value = decode(entry, JOURNAL_TYPES)
        if isinstance(value, Started) or not parts:
            parts.append([])
        parts[-1].append(value)
    timeline = follow(parts, float(lines[-1]["at"]))
    if not timeline.spans:
        raise WrongInput(f"{folder}: the run has only begun: nothing to report")
    name = folder.path.rstrip("/").rpartition("/")[2]
    detect_s = (read_json(folder, "config.json") or {}).get("detect_s")
    metrics = read_records(folder, "metrics.jsonl", METRICS_KINDS)
    rolled_back = read_records(folder, ROLLED_BACK, METRICS_KINDS)
    is_script = "level" in (read_json(folder, "status.json") or {})
    return Story(
        name=name,
        timeline=timeline,
        metrics=metrics,
        rolled_back=rolled_back,
        done=read_done(folder),
        detect_s=detect_s,
        is_script=is_script,
    )


def report(story: Story) -> dict[str, Any]:
    """The report. All times are seconds; those ending in `_at_s` count from the run's start."""
    line = story.timeline
    wall_s = line.ended - line.began
    ranks = [line.rank_buckets(rank) for rank in range(line.max_workers)]
    busy_s = sum(buckets.get(PRODUCTIVE, 0.0) for buckets in ranks)
    buckets = line.buckets()
    return {
        "run": story.name,
        "scenario": story.done[-1].scenario if story.done else None,
        "outcome": line.outcome,
        "steps": story.metrics[-1]["step"] if story.metrics else 0,
        "lost_steps": line.lost_steps,
        "wall_s": wall_s,
        **gaps(story),
        "goodput": {
            "time": buckets.get(PRODUCTIVE, 0.0) / wall_s if wall_s else 0.0,
            "capacity": busy_s / (wall_s * len(ranks)) if wall_s and ranks else 0.0,
        },
        "buckets": buckets,
        "ranks": [{"rank": rank, "buckets": ranks[rank]} for rank in range(len(ranks))],
        "faults": [cost(done, story) for done in story.done],
        "recoveries": [
            {
                "at_s": episode.healed_at - episode.recovery.total_s - line.began,
                "workers": [worker_name(loss.worker) for loss in episode.losses],
                **asdict(episode.recovery),
            }
            for episode in line.episodes
        ],
    }


def gaps(story: Story) -> dict[str, float]:
    """From the run's first committed step on: for how long at most no step was committed that
    lasted, and none at all, those that the run fell back behind included. A run that neither
    succeeded nor was stopped waited for one until its end."""
    lasting = [line["time"] for line in story.metrics]
    committed = sorted([*lasting, *(line["time"] for line in story.rolled_back)])
    is_complete = story.timeline.outcome in ("succeeded", "stopped")
    end = [] if is_complete else [story.timeline.ended]
    return {
        "longest_gap_s": longest([*committed[:1], *lasting, *end]),
        "longest_gap_any_step_s": longest([*committed, *end]),
    }


def longest(times: list[float]) -> float:
    return max((b - a for a, b in pairwise(times)), default=0.0)


def cost(done: Done, story: Story) -> dict[str, Any]:
    """One fault: what it was, how it was noticed, and the phases until the next step, whose times
    add up to `total_s`. Without a loss only `next_step_s` is known. Of a script the phases may end
    with its next report only, and `next_step_s` ends with its next step."""
    row: dict[str, Any] = {
        **{key: value for key, value in asdict(done).items() if key not in ABOUT},
        "step": step_at(done, story),
        "at_s": done.at - story.timeline.began,
        "next_step_s": next_step_s(done.at, story.metrics),
    }
    if done.note:
        return {**row, "result": "nothing happened"}
    loss = loss_of(done, story)
    episode = next((e for e in story.timeline.episodes if loss in e.losses), None)
    if episode is None:
        planned = leave_of(done, story)
        if planned:
            return {**row, **planned, "result": "left as planned"}
    if loss is None:
        is_over = row["next_step_s"] is None
        return {**row, "result": "no step followed" if is_over else "no loss followed"}
    row |= {"cause": loss.cause, "detect_s": max(0.0, loss.at - done.at)}
    if episode is None:
        return {**row, "result": "lost outside a generation"}
    phases = phases_after(loss, episode, story.timeline)
    total_s = row["detect_s"] + sum(phases.values())
    healed_at = episode.healed_at
    row["waiting_s"] = story.timeline.seconds_of(WAITING, loss.at, healed_at)
    lost_steps = episode.recovery.lost_steps
    result = {"result": "recovered", "total_s": total_s, "lost_steps": lost_steps}
    if not story.is_script:
        row["next_step_s"] = total_s
    return {**row, **phases, **result}


def step_at(done: Done, story: Story) -> int:
    """Committed steps by then. What the injector saw is older where no controller has written the
    status meanwhile."""
    lines = [line for line in (*story.metrics, *story.rolled_back) if line["time"] <= done.at]
    return max(lines, key=lambda line: line["time"])["step"] if lines else done.step


def phases_after(loss: WorkerLost, episode: Episode, line: Timeline) -> dict[str, float]:
    """From this loss on: a later one in the same recovery shares what comes after it."""
    recovery = episode.recovery
    forming_s = recovery.form_s - recovery.waiting_s
    form_at = episode.healed_at - forming_s - recovery.state_s - recovery.first_step_s
    waiting_s = line.seconds_of(WAITING, loss.at, form_at)
    return {
        "fence_s": max(0.0, form_at - loss.at - waiting_s),
        "form_s": forming_s + waiting_s,
        "restore_s": recovery.state_s,
        "first_step_s": recovery.first_step_s,
    }


def loss_of(done: Done, story: Story) -> WorkerLost | None:
    """The first loss of that worker after the fault, unless a later fault on it came before, or
    it came so late that it has another cause."""
    later = (loss for loss in story.timeline.losses if loss.at >= done.at - CLOCKS_S)
    loss = next((loss for loss in later if worker_name(loss.worker) == done.worker), None)
    detect_s = story.detect_s or float("inf")
    if loss is None or loss.at - done.at > (done.for_s or 0.0) + NOTICED * detect_s:
        return None
    others = (o for o in story.done if o.worker == done.worker and not o.note)
    is_anothers = any(done.at < other.at <= loss.at + CLOCKS_S for other in others)
    return None if is_anothers else loss


def leave_of(done: Done, story: Story) -> dict[str, Any]:
    """If the fault gave its worker notice: why, after how long that was heard, and the worker gone
    (None: the journal ends before). Otherwise empty."""
    line = story.timeline
    later = (n for n in line.notices if n.at >= done.at - CLOCKS_S)
    notice = next((n for n in later if worker_name(n.worker) == done.worker), None)
    if notice is None:
        return {}
    life = next((life for life in line.lives if life.worker == notice.worker), None)
    ended_at = life.ended_at if life else None
    return {
        "cause": notice.cause,
        "detect_s": max(0.0, notice.at - done.at),
        "left_s": None if ended_at is None else ended_at - done.at,
    }


def next_step_s(at: float, metrics: list[dict[str, Any]]) -> float | None:
    return next((line["time"] - at for line in metrics if line["time"] > at), None)
