"""Figures of ``rrl status`` (rewards, pace, weights, GPUs, drains), which can be read on every terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rrl.cli.main import run
from rrl.cli.views.status import MAX_GPU_USE_AGE_S, status_view
from rrl.core.types import GpuUse, NodeName, OutsideKind, OutsideWait, Version
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Why
from rrl.tests.support.cli.explained import INSIDE_WORDS
from rrl.tests.support.cli.status_scenes import SCENES
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.text_snapshots import drawn

GIB = 2**30


@pytest.fixture
def story() -> Story:
    return Story().works()


def fact(story: Story, label: str, width: int = 100, after_s: float = 0.0) -> list[str]:
    """Return the lines that ``rrl status`` shows beside ``label``; an empty list if it does not show this label."""
    lines = drawn(status_view(story.recorded(), story.now + after_s, width), width).splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith(f"{label} ")), None)
    if first is None:
        return []
    following = lines[first + 1 :]
    count = next(index for index, line in enumerate([*following, "end"]) if not line.startswith(" " * 12))
    return [line[12:] for line in lines[first : first + 1 + count]]


def long_run(steps: int) -> Story:
    """Return the story of a run with a commit every 6 s, whose reward grows from 0 to 1."""
    story = Story(job=job_view(steps)).works()
    trainer = story.incarnation("trainer/0")
    for step in range(13, steps):
        story.wait(6).record(ev.StepCommitted(trainer, step, {"reward": step / steps}))
    return story


@pytest.mark.parametrize("width", [80, 200])
def test_curve_of_rewards_grows_with_the_steps_and_then_keeps_its_width(width: int) -> None:
    story = Story(job=job_view(1500)).works()
    trainer, columns = story.incarnation("trainer/0"), []
    for step in range(13, 1200):
        story.wait(6).record(ev.StepCommitted(trainer, step, {"reward": step / 1500}))
        if step % 7 == 0:
            (line,) = fact(story, "reward", width)
            columns.append((step, len(re.findall("[▁▂▃▄▅▆▇█]", line))))
            assert len(line) <= width - 12
    full = max(count for _, count in columns)
    assert full > width - 12 - 35
    assert [count for step, count in columns if step < full] == [step for step, _ in columns if step < full]
    assert {count for step, count in columns if step >= full} == {full}


def test_ends_of_the_curve_have_their_values() -> None:
    (line,) = fact(long_run(1000), "reward", 100)
    first, curve, last, *mean = line.split()
    assert (first, last) == ("0.37", "0.99")
    assert (curve[0], curve[-1]) == ("▃", "█")
    assert " ".join(mean) == "last ten steps 0.99"


def test_pace_has_seconds_of_a_step_time_left_and_effective_time() -> None:
    story = long_run(200)
    assert fact(story, "pace") == ["6 s a step · 6s left · ETTR –"], "no step is known to be undisturbed"
    assert fact(story.record(ev.EttrEstimated(0.9301)), "pace") == ["6 s a step · 6s left · ETTR 93 %"]


def test_time_left_warns_if_the_walltime_ends_before() -> None:
    job = msgspec.structs.replace(job_view(2000), walltime=600.0)
    story = Story(job=job).works()
    assert fact(story, "pace") == ["3 s a step · 1h39m left, walltime ends in 9m17s · ETTR –"]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ((12, 12), "rollouts have those of the trainer"),
        ((11, 11), "rollouts 1 step behind the trainer"),
        ((12, 9), "rollouts 0 to 3 steps behind the trainer"),
    ],
)
def test_lag_of_the_weights_is_shown(versions: tuple[int, int], expected: str, story: Story) -> None:
    for index, step in enumerate(versions):
        story.record(ev.VersionAvailable(story.incarnation(f"rollout/{index}"), Version(step, 1)))
    assert fact(story, "weights") == [expected]


def test_use_of_gpus_is_shown_by_node_while_it_is_new() -> None:
    uses = {
        NodeName("n3"): GpuUse(8, 0.874, 500 * GIB, 640 * GIB),
        NodeName("n4"): GpuUse(8, None, 0, 0),
        NodeName("n2"): GpuUse(1, 0.0, 2 * GIB, 80 * GIB),
        NodeName("elsewhere"): GpuUse(1, 1.0, 0, 0),
    }
    story = Story().works().record(ev.GpuUseRecorded(uses))
    assert fact(story, "gpus") == ["n2: 0 % busy, 2 of 80 GiB · n3: 87 % busy, 500 of 640 GiB · n4"]
    assert fact(story, "gpus", after_s=MAX_GPU_USE_AGE_S + 1) == []
    assert fact(Story().works(), "gpus") == []


def test_use_of_many_gpus_is_shown_with_its_extremes(story: Story) -> None:
    state = story.recorded()
    names = [NodeName(f"g{index}") for index in range(64)]
    nodes = {name: msgspec.structs.replace(state.nodes[NodeName("n1")], name=name) for name in names}
    uses = {name: GpuUse(8, 0.9, 320 * GIB, 640 * GIB) for name in names}
    uses[names[17]], uses[names[4]] = GpuUse(8, 0.03, 0, 640 * GIB), GpuUse(8, 0.9, 636 * GIB, 640 * GIB)
    state = msgspec.structs.replace(state, nodes=nodes, gpu_use=uses, gpu_use_at=state.at)
    shown = drawn(status_view(state, state.at, 120), 120)
    assert "gpus        512 on 64 nodes · 89 % busy (least: g17 3 %) · memory 50 % full (most: g4 99 %)" in shown


def test_drain_refused_by_the_cluster_is_shown_as_left_to_an_administrator(story: Story) -> None:
    drain = Drain(NodeName("n4"), "rrl: gpu", Why(("Xid 79",)))
    story.record(ev.Decided(Exclude(NodeName("n4"), Why(("Xid 79",)))), ev.Intended(drain))
    story.record(ev.IntentSettled(drain.tag, False, "only operators may drain"))
    assert fact(story, "drain") == ["n4, which an administrator has to do: only operators may drain"]


def test_excluded_nodes_with_the_same_trouble_are_named_together(story: Story) -> None:
    for node in ("n3", "n4"):
        story.record(ev.Decided(Exclude(NodeName(node), Why(("Xid 79",)))))
    assert fact(story, "nodes") == ["n[1-2]  spare n5  n[3-4] excluded"]


def test_equal_notes_share_a_row(story: Story) -> None:
    for replica in ("rollout/0", "rollout/1"):
        story.record(ev.NoteChanged(story.incarnation(replica), "the judge is slow"))
    assert fact(story, "note") == ["rollout/0 and 1 more: the judge is slow"]


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (OutsideWait(OutsideKind.EPISODE, None, 60.0), "waits for 1m03s for an outside agent to open an episode"),
        (OutsideWait(OutsideKind.AGENT, 7, 840.0), "waits for episode 7 of outside agents, opened 14m03s ago"),
        (OutsideWait(OutsideKind.REWARD, 7, 7200.0), "waits for the reward of episode 7, finished 2h00m ago"),
    ],
)
def test_wait_for_somebody_outside_is_named_with_its_time_while_it_lasts(
    wait: OutsideWait, text: str, story: Story
) -> None:
    store = story.incarnation("trajectories/0")
    story.record(ev.OutsideWaitChanged(store, wait))
    assert fact(story, "outside", after_s=3.0) == [f"the run {text}"]
    story.record(ev.OutsideWaitChanged(store))
    assert fact(story, "outside") == []


def test_number_of_the_manager_is_shown_if_it_is_not_the_first(story: Story) -> None:
    assert fact(story, "manager", after_s=3.0) == ["on login1 for 46s, last record 3s ago"]
    story.wait(10).epoch = 3
    story.record(ev.ManagerStarted("login2", 1))
    assert fact(story, "manager", after_s=3.0) == ["number 3 of this run, on login2 for 3s, last record 3s ago"]


# ── terminals ──────────────────────────────────────────────────────────────────────────────────────────────────────
READABLE_COLOURS = {"red", "green", "yellow", "blue", "magenta", "cyan", "bright_black"}
"""Colours of the terminal's own palette that are readable on a light and on a dark background."""


@pytest.mark.parametrize("scene", SCENES)
def test_a_status_has_no_internal_word_and_is_readable_in_every_colour_and_without(scene: str) -> None:
    story = SCENES[scene]()
    view, text = status_view(story.recorded(), story.now + 4, 80), io.StringIO()
    assert not INSIDE_WORDS.findall(plain := drawn(view, 80))
    console = Console(file=text, width=80, force_terminal=True, color_system="truecolor", _environ={}, highlight=False)
    styles = [style for _, style, _ in console.render(view) if style is not None]
    assert {style.color.name for style in styles if style.color is not None and not style.color.is_default} <= (
        READABLE_COLOURS
    )
    assert not [style for style in styles if style.bgcolor is not None and not style.bgcolor.is_default]
    Console(file=text, width=80, force_terminal=True, no_color=True, _environ={}, highlight=False).print(view)
    sequences = set(re.findall(r"\x1b\[([0-9;]*)m", text.getvalue()))
    assert sequences <= {"0", "1", "2"}, "a sequence sets more than bold and dim, which are not colours"
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    assert [line.rstrip() for line in uncoloured.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("scene", ["lost", "512"])
def test_output_to_a_pipe_is_plain_lines_without_trailing_blanks(
    scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SCENES[scene]().written(tmp_path)
    monkeypatch.setenv("RRL_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["status"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert re.search(r"^rollout/\d+ +#1  n3    dead", out, re.MULTILINE)
    assert not [line for line in out.splitlines() if line != line.rstrip() or len(line) > 80]


def test_bytes_of_deltas_are_shown_for_the_newest_versions_of_current_rollouts(story: Story) -> None:
    lag = "rollouts have those of the trainer"
    story.pulls("rollout/0", 12, 1001, 1000).pulls("rollout/1", 12, 1001, 1000)
    assert fact(story, "weights") == [lag], "the first version, which is always whole, is shown"
    story.pulls("rollout/0", 12, 1021, 2000)
    assert fact(story, "weights") == [f"{lag} · deltas of 2 % of the bytes"]
    story.pulls("rollout/1", 12, 1071, 3000, fallbacks=1).pulls("rollout/0", 12, 1039, 3000, fallbacks=2)
    assert fact(story, "weights") == [f"{lag} · deltas of 2.9 % of the bytes · 3 delta fallbacks"]
    story.fences("rollout/1")
    assert "deltas of 1.8 % of the bytes · 2 delta fallbacks" in fact(story, "weights")[0]
    story.pulls("rollout/0", 12, 2040, 4000, fallbacks=2)
    assert "deltas" not in fact(story, "weights")[0], "whole versions are shown as deltas"


def test_received_weights_of_an_earlier_incarnation_do_not_count_for_the_next_one(story: Story) -> None:
    story.pulls("rollout/0", 11, 1000, 1000).pulls("rollout/0", 12, 1020, 2000, fallbacks=1)
    assert "1 delta fallback" in fact(story, "weights")[0]
    story.recovers("rollout/0")
    assert "delta" not in fact(story, "weights")[0]
    story.pulls("rollout/0", 12, 1000, 1000)
    assert "delta" not in fact(story, "weights")[0]
