"""The records about nodes that a manager writes to the history, without waiting for the storage."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import AllocationState, AllocationStatus
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve_for_submission
from rrl.core.run_dir import HISTORY_ENV, RUNS_ENV
from rrl.core.run_spec import RunSpec
from rrl.core.types import Cause, Evidence, Finding, NodeName, Outcome, Remedy, Verdict
from rrl.health.history.own_folder import user_name
from rrl.health.history.records import (
    ActionTaken,
    Checkpoint,
    Failed,
    FindingRecord,
    NodeAcquired,
    NodeReleased,
    Record,
    RecordsLost,
    RecoveryDone,
    RunEnded,
    RunStarted,
    read_line,
)
from rrl.manager.bootstrap.start import create
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Fence, Finish, Readmit, RestartAll, Rung, Undrain, Why
from rrl.manager.model.state import State
from rrl.manager.reporting import history_writer
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.history_events import HistoryEvents
from rrl.manager.reporting.history_writer import HistoryWriter
from rrl.tests.support.cli.story import BEGAN, Story, wide
from rrl.tests.support.cli.waiting import eventually
from rrl.tests.support.job_toml import JOB

DEADLINE = 60.0
N1, N3, N4 = NodeName("n1"), NodeName("n3"), NodeName("n4")
REASON = "rrl:small:gpu: Xid 48"


@pytest.fixture
def history() -> RecordedHistory:
    return works()


class RecordedHistory:
    """The records of a story, as a manager writes them.

    The manager gets the story from its beginning, or takes over in a given state.
    """

    def __init__(self, story: Story | None = None, state: State | None = None) -> None:
        self.story = story or Story("small", wide())
        self._read = len(self.story.stamped) if story is not None else 0
        self._state = state
        self.timeline = FailureTimeline(state)
        self.chronicle = HistoryEvents("small", "anna", "lab", "small", 1, BEGAN, state, self.timeline)
        self.records: list[Record] = list(self.chronicle.initial_records)

    def up_to_now(self) -> list[Record]:
        from rrl.manager.model.reducer import fold

        for stamped in self.story.stamped[self._read :]:
            before, self._state = self._state, fold(self._state, stamped)
            self.records += self.chronicle.apply(before, self._state, stamped, self.timeline.apply(stamped))
        self._read = len(self.story.stamped)
        return self.records

    def new(self) -> list[Record]:
        """Return the records since the last call."""
        before = len(self.records)
        return self.up_to_now()[before:]


def gpu_finding(at: float, verdict: Verdict = Verdict.FAIL, text: str = "Xid 48: double-bit ECC error") -> Finding:
    evidence = (Evidence("kernel", text, at),)
    return Finding("xid", verdict, Cause.GPU, Remedy.RESET_GPU, at, evidence, node=N3, proof=True, component="GPU-1")


def works() -> RecordedHistory:
    history = RecordedHistory()
    history.story.works()
    history.up_to_now()
    return history


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_history_begins_with_the_run_and_its_nodes() -> None:
    records = works().records
    assert records[0] == RunStarted(BEGAN, "small", "anna", "lab", "small", 1)
    assert [(one.node, one.gpus) for one in records if isinstance(one, NodeAcquired)] == [
        (f"n{i}", 8) for i in range(1, 6)
    ]
    # a run without failures has no other records
    assert all(isinstance(one, RunStarted | NodeAcquired) for one in records)


def test_released_nodes_are_recorded(history: RecordedHistory) -> None:
    status = AllocationStatus(AllocationState.RUNNING, "77", (N1, N3))
    history.story.record(ev.AllocationChanged("small.pool", status))
    assert [one.node for one in history.new() if isinstance(one, NodeReleased)] == ["n2", "n4", "n5"]


def test_lost_replica_is_a_failure_that_costs_its_gpu_time_until_it_works(history: RecordedHistory) -> None:
    history.story.wait(10).recovers("rollout/0")
    failure, back = (one for one in history.new() if isinstance(one, Failed | RecoveryDone))
    assert isinstance(failure, Failed)
    assert (failure.node, failure.incarnation, failure.stalled_replicas) == ("n3", "rollout/0#1", ("rollout/0",))
    assert (failure.cause, failure.detector, failure.injected) == ("process", "exit_record", False)
    assert isinstance(back, RecoveryDone)
    assert (back.replica, back.ok) == ("rollout/0", True)
    assert back.at - back.since == pytest.approx(0.1 + 0.2 + 3 + 1 + 0.5)
    assert back.gpu_hours == pytest.approx(4 * 4.8 / 3600, abs=1e-6)


def test_failure_names_findings_about_its_node_first(history: RecordedHistory) -> None:
    history.story.record(ev.FindingChanged(gpu_finding(history.story.now))).wait(1)
    history.story.loses("rollout/0")
    history.story.fences("rollout/0")
    (failure,) = (one for one in history.new() if isinstance(one, Failed))
    assert (failure.cause, failure.detector, failure.remedy, failure.proof) == ("gpu", "xid", "reset_gpu", True)


def test_full_restart_is_one_failure_that_affects_all_replicas() -> None:
    history, why = works(), Why(("trainer",))
    incarnations = [history.story.incarnation(replica) for replica in ("trainer/0", "rollout/0", "rollout/1")]
    fences = tuple(
        Fence(incarnation, Rung.FULL_RESTART, why, charged=incarnation.replica == "trainer/0")
        for incarnation in incarnations
    )
    history.story.record(ev.Decided(RestartAll(why, fences)))
    (failure,) = (one for one in history.new() if isinstance(one, Failed))
    assert (failure.incarnation, failure.stalled_replicas) == ("trainer/0#1", ("rollout/0", "rollout/1", "trainer/0"))


def test_moved_replica_has_not_failed(history: RecordedHistory) -> None:
    history.story.record(
        ev.Decided(Fence(history.story.incarnation("rollout/0"), Rung.REPLACEMENT, Why(()), charged=False))
    )
    assert not any(isinstance(one, Failed) for one in history.new())


def test_injected_failure_is_recorded_as_injected() -> None:
    from rrl.core import faults
    from rrl.core.faults import Fault, FaultKind
    from rrl.manager.model.actions import InjectFault

    history = works()
    fault, incarnation = (
        Fault("f0", FaultKind.KILL, "rollout/0", faults.FaultTrigger(step=1)),
        history.story.incarnation("rollout/0"),
    )
    history.story.record(ev.Intended(InjectFault(fault, "small.rollout-0.1", N3, Why(()), incarnation)))
    history.story.record(ev.FaultInjected("f0", incarnation, True, kind=FaultKind.KILL, node=N3))
    history.story.loses("rollout/0")
    history.story.fences("rollout/0")
    (failure,) = (one for one in history.new() if isinstance(one, Failed))
    assert failure.injected


def test_a_node_that_falls_silent_is_excluded_and_has_failed(history: RecordedHistory) -> None:
    history.story.loses_node("n4")
    found, acted, failed = history.new()
    assert isinstance(found, FindingRecord)
    assert isinstance(acted, ActionTaken)
    assert isinstance(failed, Failed)
    assert (found.node, found.verdict, acted.action) == ("n4", Verdict.FAIL, "excluded")
    assert (failed.node, failed.incarnation, failed.node_lost) == ("n4", "", True)


def test_node_excluded_by_a_user_has_not_failed(history: RecordedHistory) -> None:
    history.story.record(ev.Decided(Exclude(N3, Why(("drain requested by anna: fan",)), by="anna: fan")))
    (one,) = history.new()
    assert isinstance(one, ActionTaken)
    assert (one.action, one.by) == ("excluded", "anna: fan")


@pytest.mark.parametrize(
    ("ok", "what", "expected_text"), [(True, "drained", ""), (False, "drain_requested", "Invalid user id")]
)
def test_drain_is_recorded_with_its_result(ok: bool, what: str, expected_text: str, history: RecordedHistory) -> None:
    why = Why(("xid: Xid 48",))
    history.story.record(
        ev.Decided(Exclude(N3, why, Cause.GPU, proof=True)),
        ev.Intended(Drain(N3, REASON, why)),
        ev.IntentSettled(Drain(N3, REASON, why).tag, ok, "" if ok else "Invalid user id"),
    )
    one = history.new()[-1]
    assert one == ActionTaken(history.story.now, "n3", what, REASON, "gpu", "", expected_text, ("xid: Xid 48",))


def test_undrain_and_readmission_are_recorded(history: RecordedHistory) -> None:
    undrain = Undrain(N3, REASON, Why(()))
    history.story.record(
        ev.Intended(undrain), ev.IntentSettled(undrain.tag, True), ev.Decided(Readmit(N3, Why(("well",))))
    )
    assert [one.action for one in history.new() if isinstance(one, ActionTaken)] == ["undrained", "readmitted"]


def test_finding_is_recorded_when_raised_changed_or_cleared_only() -> None:
    history, at = works(), BEGAN
    history.story.record(ev.FindingChanged(gpu_finding(at, Verdict.WARN)))
    for i in range(50):
        history.story.wait(1).record(ev.FindingChanged(gpu_finding(at, Verdict.WARN, f"reading {i}")))
    history.story.record(ev.FindingChanged(gpu_finding(at)))
    history.story.wait(700).record(ev.FindingChanged(gpu_finding(at, text="still there")))
    history.story.record(ev.FindingChanged(gpu_finding(at, Verdict.OK)))
    history.story.record(ev.FindingChanged(gpu_finding(at, Verdict.OK)))
    found = [one for one in history.new() if isinstance(one, FindingRecord)]
    assert [(one.verdict.value, one.count) for one in found] == [("WARN", 1), ("FAIL", 2), ("FAIL", 3), ("OK", 3)]
    assert (found[0].node, found[0].component, found[0].evidence[0].text) == (
        "n3",
        "GPU-1",
        "Xid 48: double-bit ECC error",
    )


def test_finding_raised_again_is_counted_from_one(history: RecordedHistory) -> None:
    for verdict in (Verdict.FAIL, Verdict.OK, Verdict.FAIL):
        history.story.wait(60).record(ev.FindingChanged(gpu_finding(BEGAN, verdict)))
    assert [(one.verdict.value, one.count) for one in history.new() if isinstance(one, FindingRecord)] == [
        ("FAIL", 1),
        ("OK", 1),
        ("FAIL", 1),
    ]


def test_release_of_a_node_does_not_clear_its_findings(history: RecordedHistory) -> None:
    history.story.record(ev.FindingChanged(gpu_finding(BEGAN)))
    history.story.record(ev.Decided(Finish(Outcome.COMPLETED, Why(("done",)))))
    history.story.record(ev.FindingChanged(gpu_finding(BEGAN, Verdict.OK)))
    assert [one.verdict for one in history.new() if isinstance(one, FindingRecord)] == [Verdict.FAIL]


def test_next_manager_records_the_end_of_an_earlier_finding() -> None:
    first = works()
    first.story.record(ev.FindingChanged(gpu_finding(BEGAN)))
    first.up_to_now()
    second = RecordedHistory(first.story, first.story.recorded())
    (stands,) = (one for one in second.records if isinstance(one, FindingRecord))
    assert (stands.node, stands.verdict, stands.count) == ("n3", Verdict.FAIL, 0)
    first.story.wait(60).record(ev.FindingChanged(gpu_finding(BEGAN, Verdict.OK)))
    assert [one.verdict for one in second.new() if isinstance(one, FindingRecord)] == [Verdict.OK]


def test_work_on_a_node_with_findings_is_not_lost(history: RecordedHistory) -> None:
    history.story.record(ev.FindingChanged(gpu_finding(history.story.now)))
    history.story.wait(7200).loses("rollout/0")
    since = history.story.now
    history.story.fences("rollout/0").wait(36)
    history.story.ends(Outcome.FAILED, "no more nodes")
    (never,) = (one for one in history.new() if isinstance(one, RecoveryDone))
    assert since - never.since < 60


def test_finding_that_was_only_unknown_is_not_recorded(history: RecordedHistory) -> None:
    history.story.record(ev.FindingChanged(gpu_finding(BEGAN, Verdict.UNKNOWN)))
    assert history.new() == []


def test_evidence_is_limited_to_five_lines_without_control_characters(history: RecordedHistory) -> None:
    many = tuple(Evidence("kernel", f"line {i} \x1b[2J", BEGAN) for i in range(9))
    history.story.record(ev.FindingChanged(msgspec.structs.replace(gpu_finding(BEGAN), evidence=many)))
    (one,) = history.new()
    assert isinstance(one, FindingRecord)
    assert [evidence.text[:6] for evidence in one.evidence] == ["line 0", "line 1", "line 2", "line 3", "line 8"]
    assert all(evidence.text.isprintable() for evidence in one.evidence)


def test_replica_down_at_the_runs_end_has_not_recovered(history: RecordedHistory) -> None:
    history.story.loses("rollout/0")
    history.story.fences("rollout/0").wait(36)
    history.story.ends(Outcome.FAILED, "no more nodes")
    records = history.new()
    (never,) = (one for one in records if isinstance(one, RecoveryDone))
    assert not never.ok
    assert never.gpu_hours == pytest.approx(0.04)
    assert isinstance(records[-1], RunEnded)
    assert records[-1].outcome == "failed"


def test_next_manager_records_nodes_again_and_continues_the_downtime() -> None:
    first = works()
    first.story.loses("rollout/0")
    first.story.fences("rollout/0").wait(30)
    first.up_to_now()
    second = RecordedHistory(first.story, first.story.recorded())
    assert [one.node for one in second.records if isinstance(one, NodeAcquired)] == [f"n{i}" for i in range(1, 6)]
    first.story.launches("rollout/0").joins("rollout/0", "generate").wait(6)
    first.story.record(ev.FirstWorkDone(first.story.incarnation("rollout/0")))
    (back,) = (one for one in second.new() if isinstance(one, RecoveryDone))
    assert back.gpu_hours == pytest.approx(4 * 36 / 3600, abs=1e-4)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Writer(HistoryWriter):
    """A history writer that gets the timeline of failures, as its manager would pass it."""

    def __init__(self, folder: Path | str, story: Story, epoch: int = 1) -> None:
        self.timeline = FailureTimeline()
        super().__init__(str(folder), "small", epoch, story.job, BEGAN, None, self.timeline)

    def write(self, before: State | None, after: State, stamped: ev.Stamped) -> None:
        self.on_event(before, after, stamped, self.timeline.apply(stamped))


def write_story(records: _Writer, story: Story) -> None:
    from rrl.manager.model.reducer import fold

    state: State | None = None
    for stamped in story.stamped:
        before, state = state, fold(state, stamped)
        records.write(before, state, stamped)


def read(path: Path) -> list[Record | None]:
    return [read_line(text) for text in path.read_bytes().splitlines()]


def file_of(folder: Path, epoch: int = 1) -> Path:
    return folder / user_name() / f"small.{epoch:06}.jsonl"


def test_history_file_is_in_the_users_folder_and_readable_by_all(tmp_path: Path) -> None:
    story = Story("small", wide()).works().recovers("rollout/0").ends(Outcome.COMPLETED, "done")
    before = os.umask(0o077)
    try:
        kept = _Writer(tmp_path, story)
        write_story(kept, story)
        kept.close()
    finally:
        os.umask(before)
    records = read(file_of(tmp_path))
    assert None not in records
    assert {type(one) for one in records} >= {RunStarted, NodeAcquired, FindingRecord, Failed, RecoveryDone, RunEnded}
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o644
    assert stat.S_IMODE(file_of(tmp_path).parent.stat().st_mode) == 0o755
    assert kept.lost == 0


def test_each_manager_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for epoch in (1, 2):
        kept = _Writer(tmp_path, Story("small", wide()), epoch)
        kept.close()
    names = sorted(path.name for path in (tmp_path / user_name()).iterdir())
    assert names == ["small.000001.jsonl", "small.000002.jsonl"]


def test_nothing_is_written_without_a_history_folder() -> None:
    kept = _Writer("", Story("small", wide()))
    write_story(kept, Story("small", wide()).works())
    kept.close()
    assert kept.lost == 0


@pytest.mark.parametrize("case", ["missing", "foreign", "taken", "a link"])
def test_unwritable_folder_loses_records_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    folder = tmp_path / "history"
    if case != "missing":
        (folder / user_name()).mkdir(parents=True)
    if case == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder / user_name(), 65534, -1)
    elif case == "taken":
        file_of(folder).write_text("")
    elif case == "a link":
        os.symlink(tmp_path / "victim", file_of(folder))
    story = Story("small", wide()).works()
    kept = _Writer(folder, story)
    write_story(kept, story)
    kept.close()
    assert kept.lost == 6
    assert caplog.text.count("records are lost") == 1
    assert not (tmp_path / "victim").exists()


def test_hung_storage_does_not_delay_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    back = threading.Event()
    really = os.write

    def hangs(fd: int, data: bytes) -> int:
        assert back.wait(DEADLINE)
        return really(fd, data)

    monkeypatch.setattr(history_writer, "_write", hangs)
    monkeypatch.setattr(history_writer, "MAX_QUEUED_RECORDS", 8)
    monkeypatch.setattr(history_writer, "CLOSE_TIMEOUT_S", 0.1)
    story = Story("small", wide()).works()
    for i in range(100):
        story.record(ev.Decided(Exclude(NodeName(f"x{i}"), Why(()), by="anna")))
    kept = _Writer(tmp_path, story)
    write_story(kept, story)
    kept.close()
    assert kept._thread is not None
    assert kept._thread.is_alive()  # it hangs there still
    assert kept.lost >= 80
    assert caplog.text.count("records are lost") == 1
    back.set()


def test_full_disk_loses_records_and_the_file_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, full = os.write, threading.Event()

    write_sizes = [20]

    def short(fd: int, data: bytes) -> int:
        if not full.is_set():
            return really(fd, data)
        if not write_sizes:
            raise OSError(28, "No space left on device")
        return really(fd, data[: write_sizes.pop()])

    monkeypatch.setattr(history_writer, "_write", short)
    story = Story("small", wide())
    kept = _Writer(tmp_path, story)
    path = file_of(tmp_path)
    eventually(lambda: path.exists() and path.stat().st_size)
    full.set()
    write_story(kept, story.works())
    eventually(lambda: kept.lost == 5)
    full.clear()
    kept.write(story.recorded(), story.recorded(), ev.Stamped(99, story.now, 1, ev.RunEnded(Outcome.COMPLETED, "done")))
    kept.close()
    records = read(path)
    assert [type(one) for one in records if one is not None] == [RunStarted, RunEnded, RecordsLost]
    assert isinstance(records[-1], RecordsLost)
    assert records[-1].lines == 5


def test_run_without_events_writes_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_writer, "CHECKPOINT_INTERVAL_S", 0.02)
    kept = _Writer(tmp_path, Story("small", wide()))
    path = file_of(tmp_path)
    eventually(lambda: path.exists() and any(isinstance(one, Checkpoint) for one in read(path)))
    kept.close()


# ── which folder ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("expected_text", "site", "folder"),
    [("", "", ""), ("", "/site/history", "/site/history"), ("/mine", "/site/history", "/mine"), ("/mine", "", "/mine")],
)
def test_history_folder_comes_from_the_job_or_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_text: str, site: str, folder: str
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.setenv(HISTORY_ENV, site)
    source = tmp_path / "job.toml"
    source.write_text(JOB + (f'\n[health]\nhistory = "{expected_text}"\n' if expected_text else ""))
    job = load_job(source)
    run = create(job, resolve_for_submission(job), source)
    assert msgspec.json.decode(run.run_spec.read_bytes(), type=RunSpec).health.history == folder
