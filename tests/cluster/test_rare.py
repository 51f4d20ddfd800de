"""What happens to few runs, and must cost them no bit, no step and nobody who is well."""

import functools

import pytest

from tests.cluster.live import assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def start_rare(start):
    """start_rare("Class", "name", **options) -> LiveRun (a context manager)."""
    return functools.partial(start, job="rare")


@pytest.fixture
def undisturbed(start_rare):
    """undisturbed("Class", **options): the end of the run with one worker, and its samples."""

    def run_alone(target: str, **options) -> tuple[dict, list[str]]:
        with start_rare(target, "alone", workers=1, **options) as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        return end["result"], [line["sha256"] for line in run.lines("samples.jsonl")]

    return run_alone


def causes(end) -> list[str]:
    return [recovery["cause"] for recovery in end["result"]["recoveries"]]


def reasons(run) -> list[str]:
    return [line["entry"]["reason"] for line in run.lines("journal.jsonl") if "entry" in line]


def test_channels_last_with_fused_updates_is_one_run_for_all_world_sizes(start_rare, undisturbed):
    steps = 60
    alone, samples = undisturbed("ChannelsLast", steps=steps)
    with start_rare("ChannelsLast", workers=2, steps=steps, set=["sleep=0.05"]) as run:
        run.wait_for_step(lambda s: s["world_size"] == 2 and s["step"] > 5)
        run.kill(rank=0)
        end = run.finish()
    assert_same_bits(run, end, (alone["weights_sha256"], samples), steps)
    assert causes(end) == ["process_died"]
    with start_rare("ChannelsLast", "fast", workers=2, steps=steps, reduction="fast") as run:
        fast = run.finish()["result"]
    assert fast["loss"] == pytest.approx(alone["loss"], rel=1e-3)


def test_a_bitwise_run_goes_on_with_its_own_number_of_threads_only(start):
    with start("Toy", workers=1, steps=4) as run:
        assert run.finish()["status"] == 0
    with start("Toy", workers=1, steps=8, cpus_per_worker=2) as run:
        end = run.finish()
    assert end["status"] == 2
    assert "cpus_per_worker was 1 and now is 2" in end["err"]
    with start("Toy", workers=1, steps=8) as run:
        end = run.finish()
    assert (end["status"], end["result"]["steps"]) == (0, 8)


def test_state_that_nobody_could_take_over_is_refused_before_the_first_step(start_rare):
    with start_rare("KeepsADeque", workers=2, steps=6) as run:
        end = run.finish()
    assert end["status"] == 2
    assert "optimizer Remembers cannot be kept" in end["err"]
    assert not (run.directory / "metrics.jsonl").exists()


def test_a_newcomer_without_memory_for_the_state_is_one_lost_newcomer(
    start_rare, undisturbed, tmp_path
):
    steps = 60
    bulk = ["numbers=20_000_000", f"marker='{tmp_path}'", "spare=120_000_000"]
    alone, samples = undisturbed("Starved", steps=steps, set=bulk)
    with start_rare("Starved", workers=2, steps=steps, set=[*bulk, "sleep=0.1"]) as run:
        status = run.wait_for_step(lambda s: s["world_size"] == 2 and s["step"] > 2)
        (tmp_path / "killed").touch()
        run.kill(rank=0)
        again = run.wait_for_step(
            lambda s: s["world_size"] == 2 and s["generation"] > status["generation"]
        )
        assert again["workers"][0]["pid"] == status["workers"][1]["pid"]
        end = run.finish()
    assert (tmp_path / "starved").exists()
    assert_same_bits(run, end, (alone["weights_sha256"], samples), steps)
    assert end["result"]["lost_steps"] == 0
    assert causes(end) == ["process_died"], "the newcomer was no member"
    assert any("w2" in reason and "lost" in reason for reason in reasons(run)), reasons(run)


def test_a_final_save_may_take_longer_than_100_detect_s(start_rare, undisturbed):
    """20 blocks of 3 s each; detect_s is 0.5."""
    steps, bulk = 6, ["numbers=7_000_000", "seconds=3"]
    alone, samples = undisturbed(
        "WritesSlowly", steps=steps, set=["numbers=7_000_000", "seconds=0"]
    )
    options = {"workers": 1, "steps": steps, "detect_s": 0.5, "checkpoint_every": 1000}
    with start_rare("WritesSlowly", set=bulk, **options) as run:
        end = run.finish()
    assert_same_bits(run, end, (alone["weights_sha256"], samples), steps)
    result = end["result"]
    badput = result["badput"]
    assert sum(badput.values()) > 50, badput
    assert result["recoveries"] == []


def test_whoever_is_through_is_not_ended_for_one_that_froze_in_the_last_step(
    start_rare, reference, tmp_path
):
    steps = 30
    settings = [f"marker='{tmp_path}'", f"steps={steps}", "sleep=0.02"]
    options = {"workers": 3, "steps": steps, "detect_s": 2.0, "eval_every": 1, "set": settings}
    with start_rare("FreezesInItsLastStep", **options) as run:
        status = run.wait_for_step(lambda s: s["world_size"] == 3)
        frozen = status["workers"][1]["id"]
        end = run.finish()
    assert (tmp_path / "frozen").exists()
    assert_same_bits(run, end, reference(steps=steps), steps)
    assert end["result"]["lost_steps"] == 0
    assert causes(end) == ["hung"]
    lost = [reason for reason in reasons(run) if " lost (" in reason]
    assert len(lost) == 1, lost
    assert frozen in lost[0]
