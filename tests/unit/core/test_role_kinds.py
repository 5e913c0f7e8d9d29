"""What a role is follows from its kind, not from its name.

Two runs are the same but for the name of their rollouts: then their plans, views and figures must be the same, too.
Other runs have rollouts of two roles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.views.status import status_view
from rrl.core.run_dir import RUNS_ENV
from rrl.core.run_spec import Recovery, RunSpec
from rrl.core.types import Incarnation, Outcome, ReplicaId, Version
from rrl.health.detection.bounds import bounds
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.intake.finding_gate import restore_monitor
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch, Resize, Rung
from rrl.manager.model.queries import weights_lag_steps
from rrl.manager.model.reducer import fold
from rrl.manager.peer_directory import build_directory
from rrl.manager.reporting.failure_timeline import FailureTimeline
from rrl.manager.reporting.metrics import Facts, RunCounters, TokenCounter, samples
from rrl.roles.worker.status.work_status import entered_phase
from rrl.tests.support.cli.status_scenes import SCENES, paced
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn
from rrl.tests.support.manager.accounted import failed
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, with_fast_rollouts
from rrl.tests.support.manager.world import World

OTHER = "sampler"
"""Another name of the rollouts: as long, and between the same names, so that views have the same layout and order."""
FAST, FAST_1 = ReplicaId("fast/0"), ReplicaId("fast/1")


def renamed(encoded: bytes) -> bytes:
    """Return encoded values with ``rollout`` as a role, but not as a kind or as a table of settings, renamed."""
    for mark in ("{}/", ".{}-", ":{}", '"name":"{}"', '"{}"]'):
        encoded = encoded.replace(mark.format("rollout").encode(), mark.format(OTHER).encode())
    return encoded


def both(spec: RunSpec) -> tuple[RunSpec, RunSpec]:
    return spec, msgspec.json.decode(renamed(msgspec.json.encode(spec)), type=RunSpec)


def retold(story: Story) -> Story:
    """Return the same run with the other name of its rollouts."""
    events = msgspec.json.decode(renamed(msgspec.json.encode(story.stamped)), type=list[ev.Stamped])
    started = events[0].event
    assert isinstance(started, ev.RunStarted)
    other = Story(story.run, started.job)
    other.stamped, other.state, other.at = events, None, story.at
    for stamped in events:
        other.state = fold(other.state, stamped)
    return other


def usual_name(text: str) -> str:
    return text.replace(OTHER, "rollout")


def played(job: RunSpec) -> World:
    """Return a run that promotes standby processes, displaces extras and rollouts, and loses and gains nodes."""
    (rollouts,) = job.kind("rollout")
    first, second, last = (ReplicaId(f"{rollouts.name}/{index}") for index in range(3))
    world = World(job, nodes=12).steady().warmed()
    world.kill(first)
    world.steady().warmed().lose_node(world.node_of(second))
    world.wait(30.0).steady().warmed().lose_node(world.node_of(TRAINER))
    world.wait(30.0).steady().warmed().lose_node(world.node_of(TRAINER))
    world.wait(30.0).steady().freeze(last)
    world.steady().commit(world.state.step + 1)
    world.cancel()
    return world.play()


def test_plans_depend_on_the_kind_of_the_rollouts_not_on_their_name() -> None:
    job = gang_job(2, 1, donors=True, spares=2, extras=True)
    usual, other = (played(spec) for spec in both(job))
    assert {fence.rung for fence in usual.decided(Fence)} >= {Rung.STANDBY, Rung.IN_PLACE}
    assert {bool(resize.start) for resize in usual.decided(Resize)} == {True, False}
    assert any(launch.standby is not None for launch in usual.decided(Launch))
    assert usual_name(msgspec.json.encode(other.events).decode()) == msgspec.json.encode(usual.events).decode()
    assert usual_name(repr(build_directory(other.state, 1))) == repr(build_directory(usual.state, 1))


def disturbed() -> Story:
    """Return a run with idle shares, in which a rollout and the trainer fail."""
    return failed(failed(paced(), "rollout/1"), "trainer/0").wait(3)


STORIES: dict[str, Callable[[], Story]] = {
    **{name: SCENES[name] for name in ("running", "relaunching", "node_lost", "paced")},
    "disturbed": disturbed,
}


@pytest.mark.parametrize("name", STORIES)
def test_views_and_metrics_depend_on_the_kind_of_the_rollouts_not_on_their_name(name: str) -> None:
    story = STORIES[name]()
    other = retold(story)
    shown, also = (drawn(status_view(one.recorded(), one.now, 100), 100) for one in (story, other))
    assert usual_name(also) == shown
    measured, too = (_measured(one) for one in (story, other))
    assert measured
    assert usual_name(too) == measured


def _measured(story: Story) -> str:
    timeline = FailureTimeline()
    counters = RunCounters(timeline)
    for stamped in story.stamped:
        changes = timeline.apply(stamped)
        counters.apply(None, story.recorded(), stamped, changes)
    families = samples(story.recorded(), counters, Facts(story.now))
    return "\n".join(str(sample) for family in families for sample in family.samples)


def test_results_depend_on_the_kind_of_the_rollouts_not_on_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = disturbed().ends(Outcome.COMPLETED, "done")
    results = []
    for name, story in (("a", ended), ("b", retold(ended))):
        monkeypatch.setenv(RUNS_ENV, str(tmp_path / name))
        (tmp_path / name).mkdir()
        run = story.written(tmp_path / name)
        page = tmp_path / name / "page.html"
        for command in (
            "status",
            "report",
            "report --json",
            f"report --html {page}",
            "metrics",
            "explain",
            "explain --json",
        ):
            assert main.run([*command.split(), *(["small-1120"] if "explain" in command else [])]) == 0, command
        output = capsys.readouterr().out + page.read_text() + run.summary.read_text()
        results.append(output.replace(str(tmp_path / name), ""))
    assert usual_name(results[1]) == results[0]
    recoveries = json.loads((tmp_path / "b" / ended.run / "summary.json").read_text())["recoveries"]
    assert [(each["replica"], each["weights_s"]) for each in recoveries] == [(f"{OTHER}/1", 1.0), ("trainer/0", None)]


def test_second_role_of_rollouts_is_displaced_like_the_first() -> None:
    recovery = Recovery(breaker=0.9)
    job = with_fast_rollouts(gang_job(2, 1, donors=True, spares=1, rollouts=1, recovery=recovery), 2)
    world = World(job).steady().warmed()
    assert world.ready_standbys().keys() >= {world.node_of(FAST_1)}, "no trainer's standby waits beside the second role"
    for _ in range(2):  # the first loss takes the spare node
        world.lose_node(world.node_of(TRAINER))
        world.wait(30.0)
    displaced = {
        fence.incarnation.replica for fence in world.decided(Fence) if fence.rung is Rung.STANDBY and not fence.charged
    }
    assert displaced == {FAST_1}


def test_second_role_of_rollouts_counts_in_weights_and_tokens() -> None:
    job = with_fast_rollouts(gang_job(2, 1, rollouts=1), 2)
    world = World(job).steady()
    world.commit(3)
    assert weights_lag_steps(world.state) == (3, 3)
    for replica in (ROLLOUTS[0], FAST):
        world.happen(ev.VersionAvailable(Incarnation(replica, 1), Version(3, 1)))
    assert weights_lag_steps(world.state) == (0, 3), "fast/1 still has the first weights"
    monitor = HealthMonitor()
    restore_monitor(monitor, world.state, world.now)
    for replica, tokens in ((ROLLOUTS[0], 5), (FAST, 20), (TRAINER, 300)):
        monitor.on_hello(Incarnation(replica, 1), world.node_of(replica), "generate", world.now)
        monitor.on_heartbeat(Incarnation(replica, 1), "generate", tokens, None, world.now)
    assert TokenCounter(monitor).total() == 25


def test_second_role_of_rollouts_has_the_bounds_of_the_first_and_is_awaited_with_it() -> None:
    job = with_fast_rollouts(gang_job(1, 1, rollouts=1), 1)
    of_role = {
        name: [(*msgspec.structs.astuple(one)[1:],) for one in bounds(job) if one.role == name]
        for name in ("rollout", "fast")
    }
    assert of_role["fast"] == of_role["rollout"] != []
    assert entered_phase(job, "wait_data", None).waits_for is None, "it names one role of two that it waits for"
    assert entered_phase(gang_job(1, 1, rollouts=1), "wait_data", None).waits_for == ROLLOUTS[0]
