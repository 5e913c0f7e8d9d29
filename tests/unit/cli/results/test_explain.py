"""``rrl explain``: the text about every rung of the repair ladder, the selection, and the result of each decision."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rrl.api.runs import read_state
from rrl.cli import main
from rrl.cli.views.explanation import explanation_view
from rrl.cluster.base import NodeState, NodeStatus
from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import Recovery
from rrl.core.types import AGENT, NodeName, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import (
    Exclude,
    Fence,
    Finish,
    InjectFault,
    Launch,
    Readmit,
    Request,
    RestartAll,
    Rung,
    Why,
)
from rrl.manager.reporting.decisions.expectations import Arrival
from rrl.manager.reporting.decisions.explanations import Explanation, Takeover, explain, is_repair
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.explained import INSIDE_WORDS, assert_explained
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, STORE, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World, lost

ROOT = Path(__file__).parents[4]
R0, R1 = ROLLOUTS
N3 = NodeName("n3")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# ── runs in which each rung is taken ─────────────────────────────────────────────────────────────────────────────────
def _played(world: World) -> World:
    return world.play(lambda: world.works() or world.over, timeout_s=300.0)


def restart_in_place() -> World:
    world = World(job()).steady()
    world.kill(R0)
    return _played(world)


def promotion_in_place() -> World:
    world = World(gang_job(1, 1)).steady().warmed()
    world.kill(TRAINER)
    return _played(world)


def promotion_on_a_spare() -> World:
    world = World(gang_job(1, 1, spares=2)).steady().warmed()
    world.lose_node(world.node_of(TRAINER))
    return world.steady()


def donor_rollout() -> World:
    world = World(gang_job(1, 1, donors=True, spares=0), nodes=20).steady().warmed()
    world.lose_node(world.node_of(TRAINER))
    return world.steady()


def spare_node() -> World:
    world = World(job(), nodes=9).steady()
    world.lose_node(world.node_of(TRAINER))
    return world.steady()


def node_not_at_fault() -> World:
    world = World(job(recovery=Recovery(per_node=1, per_replica=9)), nodes=9).steady()
    for _ in range(4):
        world.kill(R0)
        _played(world)
    return world


def replacement() -> World:
    world = World(job(spares=0), nodes=20).steady()
    world.lose_node(world.node_of(R0))
    return world.steady()


def degraded() -> World:
    world = World(job(recovery=Recovery(per_node=9, per_replica=2))).steady()
    for _ in range(3):
        world.kill(R0)
        _played(world)
    return world


def no_nodes() -> World:
    world = World(job(spares=0)).steady()
    world.lose_node(world.node_of(R0))
    return world.play(timeout_s=2000.0)


def gang() -> World:
    world = World(gang_job(2, 1, warm=False)).steady()
    world.kill(ReplicaId("trainer/0.1"))
    return world.steady()


def full_restart() -> World:
    world = World(job(steps=99, recovery=Recovery(full_restarts=2, per_replica=99, per_node=99))).steady()
    world.commit(1)
    for _ in range(2):
        world.kill(TRAINER)
        _played(world)
    world.commit(2)
    return world.play(timeout_s=1.0)


def every_role_restarts() -> World:
    world = World(job(recovery=Recovery(policy="job"))).steady()
    world.kill(R0)
    return world.steady()


def give_up() -> World:
    world = World(job(recovery=Recovery(per_node=9, per_replica=1, full_restarts=0))).steady()
    for _ in range(2):
        world.kill(STORE)
        world.play(lambda: world.works() or world.over, timeout_s=200.0)
    return world.play()


def rejected() -> World:
    world = World(job())
    world.broken = {"rollout": "not started: no such file: rolout.py"}
    return world.play()


def agent() -> World:
    world = World(job(recovery=Recovery(per_replica=1)), nodes=9).steady()
    for _ in range(2):
        world.kill(ReplicaId(f"{AGENT}/n1"))
        world.play(timeout_s=30.0)
    return world


RUNGS: dict[str, tuple[Callable[[], World], type[Fence | RestartAll | Finish], Rung]] = {
    "promotion_in_place": (promotion_in_place, Fence, Rung.IN_PLACE),
    "restart_in_place": (restart_in_place, Fence, Rung.IN_PLACE),
    "promotion_on_a_spare": (promotion_on_a_spare, Fence, Rung.STANDBY),
    "donor_rollout": (donor_rollout, Fence, Rung.STANDBY),
    "spare_node": (spare_node, Fence, Rung.SPARE),
    "node_not_at_fault": (node_not_at_fault, Fence, Rung.IN_PLACE),
    "replacement": (replacement, Fence, Rung.REPLACEMENT),
    "degraded": (degraded, Fence, Rung.DEGRADED),
    "no_nodes": (no_nodes, Fence, Rung.DEGRADED),
    "gang": (gang, Fence, Rung.IN_PLACE),
    "agent": (agent, Fence, Rung.DEGRADED),
    "full_restart": (full_restart, RestartAll, Rung.FULL_RESTART),
    "every_role_restarts": (every_role_restarts, RestartAll, Rung.FULL_RESTART),
    "give_up": (give_up, Finish, Rung.GIVE_UP),
    "rejected": (rejected, Finish, Rung.GIVE_UP),
}


def repairs(world: World) -> list[Explanation]:
    return [one for one in assert_explained(world.events) if is_repair(one.action)]


@pytest.mark.parametrize("name", RUNGS)
def test_each_rung_is_explained_in_words(name: str) -> None:
    play, kind, rung = RUNGS[name]
    explanations = repairs(play())
    assert any(isinstance(one.action, kind) and one.action.why.rung is rung for one in explanations)
    shown = drawn(explanation_view(explanations, grouped=True), 100)
    assert not INSIDE_WORDS.findall(shown)
    matches_stored(f"explain_{name}", shown)


def test_every_rung_of_the_ladder_has_a_recorded_text() -> None:
    assert {rung for _, _, rung in RUNGS.values()} == set(Rung)


# ── expected results ─────────────────────────────────────────────────────────────────────────────────────────────────
def results(world: World, kind: type) -> list[tuple[Arrival, str]]:
    return [(one.result.arrival, one.result.text) for one in explain(world.events) if isinstance(one.action, kind)]


def test_restart_that_fails_before_it_joins_is_explained_as_missed() -> None:
    world = World(job(recovery=Recovery(per_node=9))).steady()
    world.broken_incarnations = {R0: "exited: no memory"}
    world.kill(R0)
    world.play(lambda: len(world.decided(Fence)) > 1, timeout_s=60.0)
    first, second = results(world, Fence)
    assert first == (Arrival.MISSED, "rollout/0#2 was stopped before it joined")
    assert second[0] is Arrival.OPEN


def test_loss_of_a_manager_is_shown_once_another_one_took_over() -> None:
    story = Story("small-7").works().wait(12)
    story.epoch = 2
    story.record(ev.ManagerStarted("login2", 9))
    (takeover,) = [one for one in assert_explained(story.stamped, ()) if isinstance(one.action, Takeover)]
    text = " ".join(drawn(explanation_view([takeover], grouped=True), 100).split())
    assert "take over from manager 1 because it recorded nothing more, and no end, for 12s" in text
    assert "expected another manager takes over: came after 12.00s, manager 2 on login2" in text


@pytest.mark.parametrize("end", [ev.ManagerStopped("SIGTERM"), ev.RunEnded(Outcome.CANCELLED, "ada wanted it")])
def test_manager_that_recorded_its_end_was_not_lost(end: ev.Event) -> None:
    story = Story("small-7").works().record(end).wait(12).record(ev.ManagerStarted("login2", 9))
    assert not [one for one in explain(story.stamped) if isinstance(one.action, Takeover)]


def test_join_after_the_deadline_is_late() -> None:
    story = Story("small-7").works()
    why = Why(("killed by signal 9",), Rung.IN_PLACE, "joins again on n3", story.now + 2)
    story.record(ev.Decided(Fence(story.incarnation("rollout/0"), Rung.IN_PLACE, why)))
    story.launches("rollout/0").wait(5).joins("rollout/0", "generate")
    (fence,) = [one for one in explain(story.stamped) if isinstance(one.action, Fence)]
    assert (fence.result.arrival, fence.result.text) == (Arrival.CAME, "rollout/0#2 joined on n3")
    for columns in (100, 50, 20):  # nothing is cut off, even on a terminal that is narrower than a label and a text
        text = drawn(explanation_view([fence], grouped=False), columns)
        assert "came after 5.00s, rollout/0#2 joined on n3 (too late)" in " ".join(text.split())


def test_refused_request_and_refused_launch_show_the_answer_of_the_cluster() -> None:
    world = World(job(spares=0), nodes=4).steady()
    world.refuse = "QOSMaxNodePerUserLimit"
    world.lose_node(world.node_of(R0))
    world.play(timeout_s=30.0)
    assert results(world, Request)[1] == (Arrival.MISSED, "refused: QOSMaxNodePerUserLimit")
    world = World(job())
    world.refuse_launch = {N3}
    world.play(timeout_s=3.0)
    assert (Arrival.MISSED, "refused: no such node") in results(world, Launch)


def test_excluded_node_stays_unused_until_it_is_used_again() -> None:
    world = World(job(recovery=Recovery(exclusion=100.0)), nodes=9).steady()
    world.happen(lost(NodeName("n5"), world.now))
    world.play(lambda: bool(world.decided(Exclude)), timeout_s=60.0)
    assert results(world, Exclude) == [(Arrival.HOLDS, "")]
    world.happen(ev.NodeChanged(NodeName("n5"), NodeStatus(NodeState.UP)))
    world.play(lambda: bool(world.decided(Readmit)), timeout_s=900.0)
    assert results(world, Exclude) == [(Arrival.CAME, "until the node was used again")]


def test_injected_fault_is_explained_up_to_its_repair() -> None:
    fault = Fault("f0", FaultKind.KILL, R0, FaultTrigger(step=1))
    world = World(job(faults=[fault])).steady()
    world.commit(1)
    world.play(world.works, timeout_s=60.0)
    world.play(timeout_s=5.0)
    assert results(world, InjectFault) == [(Arrival.CAME, "a repair was decided")]


def test_full_restart_has_its_expected_result_only_with_the_next_committed_step() -> None:
    world = World(job(steps=99, recovery=Recovery(full_restarts=2, per_replica=99, per_node=99))).steady()
    world.commit(1)
    for _ in range(2):
        world.kill(TRAINER)
        _played(world)
    assert results(world, RestartAll) == [(Arrival.OPEN, "")]
    world.commit(2)
    assert results(world, RestartAll) == [(Arrival.CAME, "every role works again")]


# ── selection ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run in which rollout/0 was killed in step 2 and the node of the trainer was lost in step 3."""
    world = World(job(), nodes=9).steady()
    world.commit(1)
    world.kill(R0)
    world.steady()
    world.commit(2)
    world.lose_node(world.node_of(TRAINER))
    world.steady()
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return written(world, tmp_path)


def written(world: World, root: Path) -> RunDir:
    run = RunDir(root / RUN)
    run.create()
    journal = Journal(run, 1)
    for stamped in world.events:
        journal.append(stamped)
    journal.flush()
    journal.close()
    return run


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.run(["explain", RUN, *arguments]) == 0
    return capsys.readouterr().out


def decided(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, str]]:
    return [(one["decision"], one["subject"]) for one in json.loads(shown(capsys, *arguments, "--json"))]


def test_command_prints_all_decisions_in_order(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    parts = ("request 5 nodes", "replace rollout/0#1 on n3", "replace trainer/0#1 on n2")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("rollout/0#2 is start number 2 of rollout/0.\n")
    once = shown(capsys, "rollout/1")
    assert "is start number" not in once, "the hint is about a start that is not shown"


def test_a_replica_selects_its_own_decisions(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    mine = [("start", "rollout/0#1 on n3"), ("replace", "rollout/0#1 on n3"), ("start", "rollout/0#2 on n3")]
    assert decided(capsys, "rollout/0") == mine
    assert decided(capsys, "rollout/0#2") == mine[2:]
    assert {subject.partition("#")[0] for _, subject in decided(capsys, "rollout")} == {R0, R1}


def test_node_selects_the_decisions_about_it(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ("stop using", "n2") in decided(capsys, "n2")
    assert ("replace", "trainer/0#1 on n2") in decided(capsys, "n2")
    assert ("start", "trainer/0#2 on n5") in decided(capsys, "n5")
    assert ("replace", "rollout/0#1 on n3") not in decided(capsys, "n2")


def test_a_number_selects_a_training_step(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert ("replace", "rollout/0#1 on n3") in decided(capsys, "2")
    assert ("replace", "trainer/0#1 on n2") in decided(capsys, "3")
    assert ("replace", "rollout/0#1 on n3") not in decided(capsys, "3")
    state = read_state(run)
    assert state is not None
    text = f"{RUN}: its manager has decided nothing in step 99; the run is at step {state.step}"
    assert shown(capsys, "99") == f"{text}\n"


def test_step_beyond_the_end_of_a_run_is_not_expected_to_come(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    completed("done-1").written(run.path.parent)
    assert main.run(["explain", "done-1", "4000"]) == 0
    assert capsys.readouterr().out.endswith("decided nothing in step 4000; the run ended at step 12\n")


def test_an_unknown_name_is_refused_in_one_line_with_the_names_that_exist(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["explain", RUN, "rolout/0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'no decision of small-1 is about "rolout/0"' in line
    assert "trajectories/0" in line


def test_json_has_every_part_of_an_explanation(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (lost,) = [one for one in json.loads(shown(capsys, "trainer/0", "--json")) if one["decision"] == "replace"]
    assert lost["evidence"] == ["n2 is excluded: node lost: manager: agent of n2 is silent"]
    assert [one["detector"] for one in lost["findings"]] == ["node_lost"]
    assert lost["repair"] == "spare node"
    assert lost["smaller_repairs"] == [{"repairs": ["restart in place"], "needed": "n2 in use"}]
    assert (lost["expected"], lost["result"], lost["late"]) == ("joins again on a spare node", "came", False)
    assert lost["deadline"] == lost["time"] + 120.0
    assert lost["time"] < lost["result_time"] < lost["deadline"]
    assert lost["result_text"] == "trainer/0#2 joined on n5"


def test_a_damaged_journal_is_refused_in_one_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (segment,) = run.journal.glob("*.seg")
    segment.write_bytes(b"not a journal")
    assert main.run(["explain", RUN]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a journal of rrl" in line


def test_text_of_roles_and_nodes_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    story = Story(RUN).works()
    story.fences("rollout/0", "\x1b]0;owned\x9c [red]markup[/red]").written(tmp_path)
    out = shown(capsys, "rollout/0")
    assert r"\x1b]0;owned\x9c [red]markup[/red]" in out
    assert "\x1b" not in out
    assert "\x1b" not in shown(capsys, "--json")


def test_example_in_the_docs_equals_the_output_of_the_program() -> None:
    (entry,) = re.findall(r"```text\n(.*?)\n```", (ROOT / "docs" / "explain.md").read_text(), re.DOTALL)
    assert f"\n{entry}\n" in drawn(explanation_view(repairs(spare_node()), grouped=True), 100)


def test_explain_of_a_run_without_decisions_reports_that_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    RunDir(tmp_path / RUN).create()
    assert shown(capsys) == "small-1: its manager has decided nothing yet\n"
