"""What reads files that others may have written, each with a real one to damage; frames are
frames.py's."""

import contextlib
import hashlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from elastic import checkpoint
from elastic.chaos.record import Done, write_done
from elastic.cli import app, data
from elastic.config import RunConfig
from elastic.control.accounting import open_account
from elastic.control.replay import JOURNAL_TYPES
from elastic.controller.decision_log import read_past
from elastic.controller.settings import limits_of
from elastic.data import parquet
from elastic.data.checking import check
from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.data.record import NAME, open_record
from elastic.data.stream import WindowKey
from elastic.driver import resume
from elastic.protocol import encoding
from elastic.protocol.errors import BadData, WrongInput
from elastic.protocol.manifest import MANIFEST, decode
from elastic.store.catalogue import Catalogue
from elastic.store.checkpoint_reading import PartReader
from elastic.store.files import open_folder
from elastic.store.journal import LineTail, read_lines
from elastic.store.run_directory import RunDirectory
from tests.control.test_controller import run as simulated
from tests.fuzz import frames
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_lines, damaged_value
from tests.fuzz.target import REFUSALS, Target
from tests.store.saves import save
from tests.store.test_run_directory import metrics, samples
from tests.workers import checkpoint_samples
from workers.checkpoint import diff, foreign_weights, stream
from workers.checkpoint.load import checkpoint_sha256
from workers.train_state import serialization

STEPS = 12


# --- checkpoints ------------------------------------------------------------------------
def manifest(folder: Path) -> Target:
    made = save(Catalogue(open_folder(str(folder))), 7, seed=1, world_size=3)

    def attempt(content: bytes) -> None:
        assert decode(content, "m") == made, "another manifest was accepted"

    return Target(made.encode(), damaged_bytes, attempt)


def sealed_manifest(folder: Path) -> Target:
    """As if its writer had meant it: what is promised may be wrong, what is done with it not."""
    train_state = checkpoint_samples.build(1)
    catalogue = checkpoint_samples.save(folder, 7, train_state)
    step = catalogue.of_step(7)
    original = stream.CheckpointReader(catalogue, 7)
    (folder / "other").mkdir()
    checkpoint_samples.save(folder / "other", 7, train_state)
    other = Catalogue(open_folder(str(folder / "other")).at("checkpoints"))

    def damage(dice: random.Random, content: bytes) -> bytes:
        value = json.loads(content)
        del value["sha256"]
        value = damaged_value(dice, value)
        text = json.dumps(value, separators=(",", ":"))[:-1]
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return f'{text},"sha256":"{sha256}"}}\n'.encode()

    def attempt(content: bytes) -> None:
        (Path(str(other.of_step(7))) / MANIFEST).write_bytes(content)
        found = other.manifest(7)
        for _ in other.verify(7):
            pass
        checkpoint_sha256(other, 7)
        reader = stream.CheckpointReader(other, 7)
        reader.model(), reader.optimizer_groups(), reader.optimizer_state()
        reader.optimizer_shared(), reader.scheduler()
        diff.compare(original, reader)
        repr(found)

    return Target(step.read(MANIFEST), damage, attempt)


def part(folder: Path) -> Target:
    catalogue = Catalogue(open_folder(str(folder)))
    file = save(catalogue, 7, seed=1, world_size=64).files[3]
    path = Path(str(catalogue.of_step(7))) / file.name
    content = path.read_bytes()

    def attempt(damaged: bytes) -> None:
        path.write_bytes(damaged)
        with PartReader(catalogue.of_step(7), file) as reader:
            found = b"".join(bytes(piece) for piece in reader.read(0, file.size_bytes))
        assert found == content, "other bytes were accepted"

    return Target(content, damaged_bytes, attempt)


def foreign_safetensors(folder: Path) -> Target:
    """It has no checksum: other weights are right ones."""
    part(folder)
    path = next(folder.rglob("*.safetensors"))

    def attempt(damaged: bytes) -> None:
        path.write_bytes(damaged)
        for read in foreign_weights.read_safetensors(path).weights.values():
            read()

    return Target(path.read_bytes(), damaged_bytes, attempt)


def torch_archive(folder: Path) -> Target:
    torch.manual_seed(0)
    values = {"w": torch.randn(20, 30), "b": torch.randn(7), "n": 3}
    path = folder / "weights.pt"
    torch.save(values, path)

    def attempt(damaged: bytes) -> None:
        path.write_bytes(damaged)
        found = foreign_weights.read_torch(path)
        weights = {name: read() for name, read in found.weights.items()}
        is_same = weights.keys() == {"w", "b"} and found.extra == {"n": 3}
        assert is_same, "other names were accepted"
        assert all(torch.equal(weights[n], values[n]) for n in weights), "other weights"

    return Target(path.read_bytes(), damaged_bytes, attempt)


def state_header(_: Path) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    header, tensors = serialization.capture(model, optimizer, scheduler)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def attempt(content: bytes) -> None:
        fresh = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(fresh)
        with contextlib.suppress(ValueError):  # a state of another model
            serialization.restore(model, fresh, schedule, json.loads(content), tensors)

    def damage(dice: random.Random, content: bytes) -> bytes:
        return json.dumps(damaged_value(dice, json.loads(content))).encode()

    return Target(json.dumps(header).encode(), damage, attempt)


# --- a run directory ---------------------------------------------------------------------
def run_directory(folder: Path) -> Path:
    with contextlib.closing(RunDirectory(str(folder), "run")) as run:
        run.begin({"steps": STEPS, "workers": 2, "target": "m:C", "arguments": {"a": 1}, "seed": 0})
        for step in range(1, STEPS + 1):
            run.record_step(metrics(step), samples(step))
    place = folder / "run"
    row = {"id": "w0", "rank": 0, "pid": 3, "state": "running", "step": 3, "own_s": 0.5}
    status = {
        "phase": "running",
        "generation": 1,
        "world_size": 1,
        "step": 3,
        "steps": STEPS,
        "committed_checkpoint": None,
        "workers": [row],
        "standby": [{**row, "rank": None}],
        "controller": {"pid": 1, "machine": "m"},
        "reason": "w1 lost",
    }
    (place / "status.json").write_text(json.dumps(status))
    recovery = dict.fromkeys((*PHASES_S, "lost_steps"), 1)
    result = {
        "outcome": "succeeded",
        "steps": STEPS,
        "loss": 0.5,
        "weights_sha256": "ab",
        "generations": 1,
        "lost_steps": 0,
        "goodput": 0.9,
        "badput": {"form": 1.0},
        "recoveries": [{"cause": "SIGKILL", **recovery}],
    }
    (place / "result.json").write_text(json.dumps(result))
    (place / "journal.jsonl").write_bytes(journal_lines())
    strike = Done(
        strike="1.1", what="kill", whom="a random rank", at=3.0, step=2, generation=1,
        phase="running", worker="w0", rank=0, node_ip="h", pid=3, scenario="s",
    )  # fmt: skip
    write_done(open_folder(str(place)), [strike])
    return place


PHASES_S = ("detect_s", "fence_s", "form_s", "state_s", "first_step_s", "total_s")


def command(*words: str) -> None:
    """Ends with one line if it refuses, and with no escape sequence in any case."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = app.main(words)
    assert status in (0, 1, 2), status
    assert status != 2 or err.getvalue().count("\n") == 1, err.getvalue()
    assert "\x1b[2J" not in out.getvalue() + err.getvalue()


def file_of_run(
    name: str, damage: Callable[..., bytes], attempt: Callable[[Path], object]
) -> Callable[[Path], Target]:
    def target(folder: Path) -> Target:
        place = run_directory(folder)

        def write(content: bytes) -> None:
            (place / name).write_bytes(content)
            attempt(place)

        return Target((place / name).read_bytes(), damage, write)

    return target


def look_at_status(place: Path) -> None:
    command("status", str(place))


def look_at_config(place: Path) -> None:
    past = resume.read_past_run(open_folder(str(place)))
    assert past is not None
    new = {"steps": STEPS, "workers": 2, "target": "m:C", "arguments": {"a": 1}, "seed": 0}
    resume.compare("here", past, new)
    command("stop", str(place))
    command("chaos", "double-fault", str(place), "--dry-run")
    command("data", "check", str(place))


def look_at_result(place: Path) -> None:
    command("watch", str(place))
    command("stop", str(place))


def look_at_metrics(place: Path) -> None:
    folder = open_folder(str(place))
    LineTail(folder, "metrics.jsonl").poll()
    with contextlib.suppress(ValueError, *REFUSALS):  # no checkpoint, or no such metric
        checkpoint.metric_by_step(folder, "loss")
        checkpoint.names_in(folder)
    with contextlib.suppress(*REFUSALS), contextlib.closing(RunDirectory(folder, ".")) as run:
        assert run.last_step <= STEPS + 1 or b"step" in (place / "metrics.jsonl").read_bytes()
    command("chaos", "report", str(place))


def look_at_samples(place: Path) -> None:
    planned = ((0, np.arange(8 * i, 8 * i + 8)) for i in range(10_000))
    folder = open_folder(str(place))
    lines = data.read_records(folder, "samples.jsonl", data.SAMPLES_KINDS)
    found = check(lines, planned, 8)
    expected = [samples(step) for step in range(1, found.steps + 1)]
    assert found.findings or not found.steps or lines != expected
    with contextlib.suppress(*REFUSALS), contextlib.closing(RunDirectory(folder, ".")):
        pass


def journal_lines() -> bytes:
    """Of a simulated run, as the recorder writes it."""
    _, entries, _ = simulated(1)
    first = {"run": "r", "account": encoding.encode(open_account(0.0)), "lost_steps": 0}
    lines: list[dict[str, Any]] = []
    for at, entry in enumerate(entries[:60]):
        about = {"at": float(at), "phase": "running", "generation": 1, "step": 1}
        lines.append({**about, **({} if lines else first), "entry": json.loads(entry)})
    evaluation = {"step": 1, "ordinal": 1, "values": {"accuracy": 0.5}}
    lines.insert(9, {"at": 9.0, "evaluation": evaluation})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


LIMITS = limits_of(RunConfig(workers=2, steps=9, global_batch=4, micro_batch=1))


def look_at_journal(place: Path) -> None:
    for words in (["replay"], ["story"], ["chaos", "report"]):
        command(*words, str(place), *(["w1"] if words == ["story"] else []))
    folder = open_folder(str(place))
    resume.newest_generation(folder, resume.read_past_run(folder))
    with contextlib.suppress(*REFUSALS):
        checkpoint.names_in(folder)
    with contextlib.suppress(*REFUSALS):
        read_past(place, "r", LIMITS)
    read_lines(folder, "journal.jsonl")


def look_at_faults(place: Path) -> None:
    command("chaos", "report", str(place))


# --- data ---------------------------------------------------------------------------------
def parquet_file(folder: Path, *, has_checksums: bool = False) -> Target:
    """Read before: whatever changes is found, in pages with checksums and in those without."""
    count = 60
    columns = {
        "row": pa.array(np.arange(count)),
        "text": pa.array([f"word{i % 7}" if i % 5 else None for i in range(count)]),
        "list": pa.array([[i] * (i % 3) for i in range(count)]),
    }
    path = folder / "p.parquet"
    options = {"row_group_size": 30, "write_page_checksum": has_checksums}
    pq.write_table(pa.table(columns), path, **options)
    plan = make_plan(parquet(path, window_bytes=1), 3)
    read = [read_window(plan, 0, window)[0] for window in range(2)]
    known = read[0].checksums | read[1].checksums

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        with contextlib.suppress(WrongInput):
            make_plan(parquet(path), 3)
        for window in range(2):
            with contextlib.suppress(BadData):
                again, _ = read_window(plan, 0, window, (), known)
                assert again.table.equals(read[window].table), "other rows were accepted"

    def crashed(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            wary = make_plan(parquet(path), 3, is_wary=True)
            for window in range(len(wary.windows(0))):
                read_window(wary, 0, window, is_wary=True)
        except (WrongInput, BadData) as error:
            return "ends with SIG" in str(error)
        return False

    return Target(path.read_bytes(), damaged_bytes, attempt, crashed)


def feed_record(folder: Path) -> Target:
    """What was read and what was left out: a later start of the run believes it."""
    parquet_file(folder)
    source = parquet(folder / "p.parquet", window_bytes=1, on_bad_file="skip", transform=half)
    plan = make_plan(source, 3)
    record = open_record(plan, str(folder))
    (folder / "config.json").write_text("{}")
    for window in range(2):
        record.add(WindowKey(0, window), 30 - window, range(window))
        record.keep({window: 5})
    record.write()

    def attempt(content: bytes) -> None:
        (folder / NAME).write_bytes(content)
        found = open_record(plan, str(folder))
        assert found.plan.hash == plan.hash, "another plan was accepted"
        found.checksums_of(WindowKey(0, 0)), found.num_left_out, found.to_json()

    return Target((folder / NAME).read_bytes(), damaged_json, attempt)


def half(table: pa.Table) -> pa.Table:
    return table.slice(0, len(table) // 2)


def checksummed_parquet(folder: Path) -> Target:
    """The first reading: what is in a page is verified, whatever else is damaged is not known."""
    target = parquet_file(folder, has_checksums=True)
    path = folder / "p.parquet"
    plan = make_plan(parquet(path), 3)
    table = read_window(plan, 0, 0)[0].table
    page = pq.ParquetFile(path).metadata.row_group(0).column(0)
    first = page.dictionary_page_offset or page.data_page_offset

    def damage(dice: random.Random, content: bytes) -> bytes:
        found = bytearray(content)
        found[first + dice.randrange(40, page.total_compressed_size)] ^= 1 << dice.randrange(8)
        return bytes(found)

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        again, _ = read_window(plan, 0, 0)
        assert again.table.equals(table), "other rows were accepted"

    return Target(target.content, damage, attempt)


# --- decisions -----------------------------------------------------------------------------
def events(_: Path) -> Target:
    """Decisions, events and members as they come over links and out of journals."""
    _, entries, _ = simulated(1)
    content = (
        next(e for e in entries if "NumberSet" in e) if "NumberSet" in str(entries) else entries[9]
    )

    def attempt(damaged: bytes) -> None:
        with contextlib.suppress(ValueError):
            encoding.loads(damaged, JOURNAL_TYPES)

    return Target(content.encode(), damaged_json, attempt)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "manifest": manifest,
    "sealed-manifest": sealed_manifest,
    "part": part,
    "safetensors": foreign_safetensors,
    "torch": torch_archive,
    "state-header": state_header,
    "status": file_of_run("status.json", damaged_json, look_at_status),
    "config": file_of_run("config.json", damaged_json, look_at_config),
    "result": file_of_run("result.json", damaged_json, look_at_result),
    "metrics": file_of_run("metrics.jsonl", damaged_lines, look_at_metrics),
    "samples": file_of_run("samples.jsonl", damaged_lines, look_at_samples),
    "journal": file_of_run("journal.jsonl", damaged_lines, look_at_journal),
    "faults": file_of_run("chaos.jsonl", damaged_lines, look_at_faults),
    "feed-record": feed_record,
    "parquet": parquet_file,
    "parquet-pages": checksummed_parquet,
    "hello": frames.hello,
    "controllers-hello": frames.controllers_hello,
    "messages": frames.messages,
    "events": events,
}
