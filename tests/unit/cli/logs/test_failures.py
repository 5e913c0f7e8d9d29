from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cli.logs.failures import FailureReport, failures
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason
from rrl.core.log_lines import stamp
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Cause, Evidence, Finding, NodeName, Outcome, Remedy, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, InjectFault, Rung, StopStep, Why
from rrl.manager.model.reduce_nodes import DRAIN
from rrl.tests.support.cli.story import BEGAN, Story

RUN = "small-7"


@pytest.fixture
def story() -> Story:
    return Story(RUN).works()


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def written(story: Story, root: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(RUNS_ENV, str(root))
    return story.written(root)


def write(run: RunDir, name: str, *lines: tuple[float, str]) -> None:
    """Write log lines with their times, in seconds since the story began."""
    with (run.logs / f"{RUN}.{name}").open("w") as file:
        file.writelines(f"{stamp(int((BEGAN + at) * 1e6)).decode()} {text}\n" for at, text in lines)


def test_each_failure_is_shown_with_its_finding_and_the_last_lines_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], story: Story
) -> None:
    at = story.at
    run = written(story.recovers("rollout/0"), tmp_path, monkeypatch)
    last = (40, "torch.OutOfMemoryError: CUDA out of memory")
    write(run, "rollout-0.1.log", *((n, f"line {n}") for n in range(40)), last)
    write(run, "rollout-0.2.log", (50, "well"))
    write(run, "rollout-1.1.log", (50, "well"))
    assert main.run(["logs", RUN, "--failed", "-n", "2"]) == 0
    assert at == 43
    assert (
        capsys.readouterr().out
        == """\
01-15 08:00:43.000 rollout/0#1 on n3 failed
    its step ended: signal 9 (SIGKILL), signalled
    process ended: step: its step ended by signal 9 (SIGKILL)
    killed by signal 9
  | 01-15 08:00:39.000 line 39
  | 01-15 08:00:40.000 torch.OutOfMemoryError: CUDA out of memory
    then: restart in place; rollout/0#2 was working 4.8 s later

"""
    )
    assert main.run(["logs", RUN, "rollout/1", "--failed"]) == 0
    assert capsys.readouterr().out == "nothing of rollout/1 has failed\n"
    assert main.run(["logs", RUN, "rollout/0", "--failed", "--json", "--grep", "memory"]) == 0
    [reported] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (reported["incarnation"], reported["node"], reported["rung"], reported["successor"]) == (
        "rollout/0#1",
        "n3",
        "restart in place",
        "rollout/0#2",
    )
    assert [line["text"] for line in reported["lines"]] == ["torch.OutOfMemoryError: CUDA out of memory"]
    assert main.run(["logs", RUN, "--failed", "--since", "2027-01-15T08:00:44"]) == 0
    assert capsys.readouterr().out == "nothing has failed since then\n"


def test_launchers_lines_are_shown_for_an_incarnation_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story(RUN).requests_nodes().gets_nodes().launches("rollout/0")
    step = story.recorded().replica(story.incarnation("rollout/0").replica).step or ""
    run = written(story.record(ev.IntentSettled(step, False, "srun: refused")), tmp_path, monkeypatch)
    (run.logs / f"{RUN}.rollout-0.1.step.log.srun").write_text("srun: error: Unable to create step: Invalid gres\n")
    assert main.run(["logs", RUN, "--failed"]) == 0
    assert (
        capsys.readouterr().out
        == """\
01-15 08:00:00.000 rollout/0#1 on n3 failed
    not launched: srun: refused
    it wrote no log lines; the last lines of its launcher:
  rollout/0#1 srun | srun: error: Unable to create step: Invalid gres

"""
    )


def test_lines_before_the_finding_of_a_continuing_incarnation_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], story: Story
) -> None:
    finding = Finding(
        "stalled",
        Verdict.FAIL,
        Cause.HANG,
        Remedy.RESTART,
        story.now,
        (Evidence("manager", "no token for 300 s", story.now),),
        incarnation=story.incarnation("rollout/0"),
    )
    story.record(ev.FindingChanged(finding))
    run = written(story, tmp_path, monkeypatch)
    write(run, "rollout-0.1.log", (1, "long ago"), (story.at, "stuck"), (story.at + 100, "moves again"))
    assert main.run(["logs", RUN, "--failed", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "| 01-15 08:00:43.000 stuck\n" in out
    assert "moves again" not in out
    assert "    it kept running\n" in out


def test_failed_and_follow_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(Story(RUN).works(), tmp_path, monkeypatch)
    assert main.run(["logs", RUN, "--failed", "-f"]) == 2
    assert capsys.readouterr().err == (
        "rrl: --failed shows past failures, --follow shows new lines: use only one of them\n"
    )


# ── the account ────────────────────────────────────────────────────────────────────────────────────────────────────
def found(story: Story) -> list[FailureReport]:
    return failures(story.stamped)


def test_process_that_was_asked_to_end_has_not_failed(story: Story) -> None:
    incarnation, step = story.incarnation("rollout/0"), "x"
    story.record(ev.Intended(StopStep(step, incarnation, 1.0, Why(("one too many",)))))
    story.record(ev.StepEnded(incarnation, step, None, 15, ExitReason.SIGNALED))
    story.record(ev.StepEnded(story.incarnation("rollout/1"), step, 0, None, ExitReason.EXITED))
    assert found(story) == []
    story.ends(Outcome.COMPLETED, "all steps are done")
    story.record(ev.StepEnded(story.incarnation("trainer/0"), step, 1, None, ExitReason.EXITED))
    assert found(story) == []


def test_lost_node_and_its_incarnations_have_failed() -> None:
    story = Story(RUN).works().wait(7).loses_node("n3")
    why = Why(("n3 is excluded: node lost: silent",), Rung.SPARE)
    story.wait(1).record(ev.Decided(Fence(story.incarnation("rollout/0"), Rung.SPARE, why)))
    (node, of_node), (failure, evidence) = found(story)
    assert (node.node, node.incarnation) == ("n3", None)
    assert of_node == ("node lost: manager: agent and all replicas silent for 10 s",)
    assert (failure.incarnation, failure.node, evidence, failure.rung) == (
        story.incarnation("rollout/0"),
        "n3",
        ("n3 is excluded: node lost: silent",),
        "spare node",
    )
    assert (failure.ended, failure.successor) == (True, None)


def test_injected_failure_is_marked(story: Story) -> None:
    for id, replica, performed in (("f1", "rollout/0", True), ("f2", "rollout/1", False)):
        incarnation = story.incarnation(replica)
        fault = InjectFault(Fault(id, FaultKind.KILL, replica), "x", NodeName("n3"), Why(()), incarnation)
        story.record(ev.Intended(fault), ev.FaultInjected(id, incarnation, performed))
    for replica in ("rollout/0", "rollout/1"):
        story.record(ev.StepEnded(story.incarnation(replica), "x", 1, None, ExitReason.EXITED))
    assert [report.failure.injected for report in found(story)] == [True, False]


def test_failure_caused_by_a_planned_node_crash_is_injected_and_one_on_another_node_is_not(story: Story) -> None:
    crash = InjectFault(Fault("f1", FaultKind.CRASH, "rollout/0"), "x", NodeName("n3"), Why(()))
    story.record(ev.Intended(crash))
    story.record(ev.FaultInjected("f1", None, True, kind=FaultKind.CRASH, target="rollout/0", node=NodeName("n3")))
    story.record(ev.FaultInjected("f1", None, True, kind=FaultKind.CRASH, node=NodeName("n3"), ended=True))
    for node in ("n3", "n4"):
        story.loses_node(node)
    for replica in ("rollout/0", "rollout/1"):  # on n3 and n4
        story.fences(replica)
    reported = {
        failure.incarnation.replica if failure.incarnation else failure.node: failure.injected
        for failure, _ in found(story)
    }
    assert reported == {"n3": True, "rollout/0": True, "n4": False, "rollout/1": False}


def test_incarnation_without_successor_has_none_shown(story: Story) -> None:
    story.loses("rollout/0")
    story.fences("rollout/0").wait(1).launches("rollout/0")
    [(failure, _)] = found(story)
    assert failure.recovered_at is None
    story.wait(2).joins("rollout/0", "loading_weights")
    [(failure, _)] = found(story)
    assert (failure.successor, failure.recovered_at) == (story.incarnation("rollout/0"), None)
    story.wait(2).record(ev.FirstWorkDone(story.incarnation("rollout/0")))
    [(failure, _)] = found(story)
    assert failure.recovered_at == story.now, "recovered_at is not the time of the first work"


def test_successor_that_joined_and_failed_before_any_work_has_not_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], story: Story
) -> None:
    story.loses("rollout/0")
    story.fences("rollout/0").launches("rollout/0").wait(2).joins("rollout/0", "loading_weights")
    story.loses("rollout/0")
    story.fences("rollout/0").launches("rollout/0")
    written(story, tmp_path, monkeypatch)
    assert main.run(["logs", RUN, "--failed"]) == 0
    out = capsys.readouterr().out
    assert "then: restart in place; rollout/0#2 joined 2.0 s later and has done no work yet\n" in out
    assert "was working" not in out


def test_successor_in_a_role_that_need_not_work_has_recovered_by_joining(story: Story) -> None:
    story.loses("trajectories/0")
    story.fences("trajectories/0").launches("trajectories/0").wait(2).joins("trajectories/0", "serve")
    [(failure, _)] = found(story)
    assert failure.recovered_at == story.now


def test_agent_fenced_on_a_node_that_a_user_drains_has_not_failed(story: Story) -> None:
    story.record(ev.CommandReceived(DRAIN, "ada", "c1", "n2"))
    story.record(
        ev.Decided(
            Fence(story.incarnation("agent/n2"), Rung.DEGRADED, Why(("n2 is excluded: drain requested by ada",)))
        )
    )
    assert failures(story.stamped) == []
    story.record(ev.Decided(Fence(story.incarnation("agent/n3"), Rung.DEGRADED, Why(("n3 is excluded: node_lost",)))))
    assert [report.failure.incarnation for report in failures(story.stamped)] == [story.incarnation("agent/n3")]


def test_failure_after_a_resume_is_reported_too() -> None:
    story = Story(RUN).works().ends(Outcome.CANCELLED, "cancelled by ada")
    story.record(ev.Resumed("ada", "c1", story.job)).launches("rollout/0", "n3").joins("rollout/0", "generate")
    story.loses("rollout/0")
    assert [report.failure.incarnation for report in failures(story.stamped)] == [story.incarnation("rollout/0")]


def _stacks(story: Story) -> ev.StacksCollected:
    return ev.StacksCollected(
        story.incarnation("rollout/0"), ("rollout/0#1: step (engine.py:95)",), file="stacks/x.txt"
    )


def test_stacks_of_a_failed_incarnation_are_printed_with_their_file(story: Story) -> None:
    story.record(_stacks(story)).wait(2)
    ((_, evidence),) = failures(story.recovers("rollout/0").stamped)
    assert evidence[-2:] == ("stacks: rollout/0#1: step (engine.py:95)", "stacks: all stacks: stacks/x.txt")


def test_stacks_of_an_earlier_suspicion_are_not_shown_for_a_later_failure(story: Story) -> None:
    story.record(_stacks(story)).wait(600)
    ((_, evidence),) = failures(story.recovers("rollout/0").stamped)
    assert not [line for line in evidence if "stacks" in line]


def test_stacks_named_by_the_finding_are_printed_once(story: Story) -> None:
    printed = ("rollout/0#1: step (engine.py:95)", "all stacks: stacks/x.txt")
    shown = tuple(Evidence("stacks", text, 1.0) for text in printed)
    incarnation = story.incarnation("rollout/0")
    found = Finding("no_answer", Verdict.FAIL, Cause.HANG, Remedy.RESTART, 1.0, shown, incarnation)
    ((_, evidence),) = failures(story.record(_stacks(story), ev.FindingChanged(found)).stamped)
    assert sum("stacks/x.txt" in line for line in evidence) == 1
