from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.api.runs import summary_of
from rrl.api.watching.run_state import RunState, standing
from rrl.cli.common.output import show
from rrl.cli.views.formatting import bar, curve, folded, resampled, stage
from rrl.cli.views.status import one_line, status_view
from rrl.cli.views.summary import next_steps_view, runs_view, summary_view
from rrl.core.run_spec import TrainerSettings
from rrl.core.text import span
from rrl.core.types import NodeName, Outcome, Version
from rrl.manager.model.actions import Exclude, Fence, RestartAll, Rung, Why
from rrl.manager.model.events import (
    CommandReceived,
    Decided,
    FindingChanged,
    Joined,
    NoteChanged,
    Resumed,
    RunEnded,
    StepCommitted,
    VersionAvailable,
)
from rrl.manager.model.table import as_dict
from rrl.manager.storage.model_folders import ModelFolder, ModelFolders
from rrl.tests.support.cli.status_scenes import SCENES, drained, ending, just_lost, node_lost, paced_and_ended
from rrl.tests.support.cli.story import BEGAN, NODES, Story, completed, job_view
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored


@pytest.fixture
def story() -> Story:
    return Story().works()


@pytest.mark.parametrize("scene", SCENES)
def test_status_of_a_run_equals_the_snapshot(scene: str) -> None:
    story = SCENES[scene]()
    text = drawn(status_view(story.recorded(), story.now + 4, 80), 80)
    assert max(map(len, text.splitlines())) <= 80
    matches_stored(f"status_{scene}_80", text)


def test_replicas_stopped_with_the_run_are_not_shown_as_lost() -> None:
    story = ending()
    shown = drawn(status_view(story.recorded(), story.now, 80), 80)
    assert "the run continues without it" not in shown
    assert "↻ rollout/0  failed on n3" in shown
    rows = {line.split()[0]: line.split()[3] for line in shown.splitlines() if "#" in line and "↻" not in line}
    assert rows.items() >= {"trainer/0": "stopping", "rollout/0": "stopping", "reward/0": "stopped"}.items()
    retired = just_lost()
    retired.record(Decided(Fence(retired.incarnation("rollout/0"), Rung.DEGRADED, Why(("it fails",)))))
    assert "the run continues without it; failed on n3" in drawn(status_view(retired.recorded(), retired.now, 80), 80)


def test_drained_replica_does_not_show_its_older_failure_as_the_reason() -> None:
    story = drained()
    lines = drawn(status_view(story.recorded(), story.now, 120), 120).splitlines()
    assert lines[-2:] == [
        "↻ rollout/1  #3 works on n5; stopped on n4 4s ago: n4 is to be drained, requested by ada: new fan",
        "↻ rollout/1  replaced; failed on n4 1m08s ago: killed by signal 9",
    ]
    assert "excluded    n4 3s ago: drain requested by ada: new fan" in lines


def test_a_node_to_be_drained_is_named_with_the_reason() -> None:
    story = Story().works().record(CommandReceived("drain", "ada", "c1", target="n4", reason="new fan"))
    assert "drain       n4, requested by ada: new fan" in drawn(status_view(story.recorded(), story.now, 80), 80)


def test_full_restart_is_shown_in_one_line(story: Story) -> None:
    story.loses("rollout/0")
    why = Why(("killed by signal 9",), Rung.FULL_RESTART)
    fences = tuple(
        Fence(story.incarnation(id), Rung.FULL_RESTART, why, charged=id == "rollout/0")
        for id in ("trajectories/0", "trainer/0", "rollout/0", "rollout/1")
    )
    story.record(Decided(RestartAll(why, fences)))
    lines = [line for line in drawn(status_view(story.recorded(), story.now, 80), 80).splitlines() if "↻" in line]
    assert lines == ["↻ rollout/0  to be launched again; failed on n3 0s ago: killed by signal 9"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_newest_failure_and_finding_are_shown_in_full(width: int, story: Story) -> None:
    cause = "exited with code 1: " + "a" * 40 + " TypeError: Expected state_dict to be dict-like"
    story.loses("rollout/0", cause)
    story.wait(1).fences("rollout/0", cause).loses("rollout/1", cause)
    shown = " ".join(drawn(status_view(story.recorded(), story.now, width), width).split())
    assert shown.count("to be dict-like") == 2
    huge = drawn(status_view(Story().works().fences("rollout/0", "x" * 10000).recorded(), BEGAN, width), width)
    assert len(huge.splitlines()) < 50, "a very long text fills the view"


def test_the_reason_for_the_end_is_shown_in_full_while_and_after_the_run_ends() -> None:
    why = (
        "12 restarts of rollout/0 within 600 s; TypeError: Expected state_dict to be dict-like; rrl logs small --failed"
    )
    stopping, ended = Story().works().stops(Outcome.FAILED, why), Story().works().ends(Outcome.FAILED, why)
    ended.record(RunEnded(Outcome.FAILED, f"{why}; rrl resume small goes on from step 12"))
    for story, shown in ((stopping, why), (ended, f"{why}; rrl resume small goes on from step 12")):
        assert shown in " ".join(drawn(status_view(story.recorded(), story.now, 80), 80).split())


def test_note_about_the_manager_replaces_its_line(story: Story) -> None:
    text = drawn(status_view(story.recorded(), story.now, 100, ["silent for 40 s", "job 7 waits"]), 100)
    assert "manager     silent for 40 s" in text
    assert "            job 7 waits" in text
    assert "epoch" not in text
    note = "no manager is running; the roles go on; start one: rrl manage quickstart-1123-035950-e6eb"
    assert note in " ".join(drawn(status_view(story.recorded(), story.now, 80, [note]), 80).split())


def test_decoded_state_gives_the_same_picture() -> None:
    story = node_lost()
    state = msgspec.msgpack.decode(
        msgspec.msgpack.encode(story.recorded(), enc_hook=as_dict), type=type(story.recorded())
    )
    assert drawn(status_view(state, story.now, 100), 100) == drawn(status_view(story.recorded(), story.now, 100), 100)


def test_text_of_a_run_is_never_rendered_as_markup() -> None:
    story = Story().works().ends(Outcome.FAILED, "[red]boom[/red] [/nonsense] :smile:")
    assert "[red]boom[/red] [/nonsense] :smile:" in drawn(status_view(story.recorded(), story.now, 100), 100)


def test_nodes_kept_after_the_end_of_the_run_are_shown() -> None:
    def picture(keep: bool) -> str:
        story = (
            Story()
            .works()
            .record(CommandReceived("cancel", "ada", "c1", keep_allocations=keep))
            .ends(Outcome.CANCELLED, "asked")
        )
        return drawn(status_view(story.recorded(), story.now, 80), 80)

    assert "kept        job 77, while it lasts (rrl resume uses it, scancel 77 releases it)" in picture(keep=True)
    assert "kept" not in picture(keep=False)


def test_one_line_summary_names_the_replicas_that_do_not_work() -> None:
    story = just_lost().fences("rollout/0")
    assert one_line(story.recorded(), story.now, "silent for 40 s", "unattended") == (
        "small-1120-064114: unattended, step 12/40, reward 0.94, rollout/0#1 dead, its manager does not respond"
    )
    assert one_line(story.recorded(), story.now, "the run directory is full: …") == (
        "small-1120-064114: recovering, step 12/40, reward 0.94, rollout/0#1 dead, the run directory is full: …"
    )


def test_summary_of_a_run_equals_the_snapshot(tmp_path: Path) -> None:
    summary = summary_of(completed().written(tmp_path))
    assert summary is not None
    matches_stored("summary", drawn(summary_view(summary | {"run_dir": "/runs/small"}), 100))


def test_summary_shows_the_idle_share_of_the_trainer(tmp_path: Path) -> None:
    summary = summary_of(paced_and_ended().written(tmp_path))
    assert summary is not None
    assert summary["stream"]["idle"]["trainer"] == {"rollouts": 0.07, "commits": 0.02}
    shown = drawn(summary_view(summary), 80).splitlines()
    row = shown.index("time      trainer 9 % idle (waits for rollouts 7 %, commits 2 %)")
    assert shown[row + 1] == "          rollout 4 % idle (waits for weights)"


def test_the_summary_of_a_run_with_agents_says_why_episodes_were_dropped() -> None:
    reasons = {"broken tool": 1, "no reward within 1h": 9, "timeout": 4, "other": 2}
    counts = {"finished": 1205, "retried": 3, "replayed": 0, "dropped": 16, "dropped_by_reason": reasons}
    summary = {"run": "x", "outcome": "completed", "episodes": counts, "turns": 2410, "token_drift": 2}
    matches_stored("summary_agents", drawn(summary_view(summary), 100))
    assert "agents" not in drawn(summary_view(summary | {"episodes": {"finished": 0, "dropped": 0}}), 100)


@pytest.mark.parametrize(
    ("outcome", "commands"),
    [
        ("completed", ["rrl export x FOLDER", "rrl logs x", "rrl resume x --steps 80", "rrl list"]),
        ("cancelled", ["rrl export x FOLDER", "rrl logs x", "rrl resume x", "rrl list"]),
        ("failed", ["rrl export x FOLDER", "rrl logs x --failed", "rrl resume x", "rrl list"]),
        ("rejected", ["rrl export x FOLDER", "rrl logs x --failed", "rrl list"]),
    ],
)
def test_suggested_next_steps_match_the_outcome(outcome: str, commands: list[str]) -> None:
    shown = drawn(
        next_steps_view({"run": "x", "outcome": outcome, "steps": 12}, 40, "rrl export x FOLDER"), 80
    ).splitlines()
    assert [line[6:].split("  ")[0] for line in shown] == commands
    assert (shown[0][:6], "step 12" in shown[0]) == ("next  ", True)
    without = drawn(next_steps_view({"run": "x", "outcome": outcome, "steps": 0}, 0, ""), 80)
    assert ("export" in without, "--steps" in without, "rrl list" in without) == (False, False, True)


def test_suggested_commands_can_be_copied_from_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    run, program = "quickstart-1128-143413-f227", "rrl/.venv/bin/rrl"
    show(next_steps_view({"run": run, "outcome": "completed", "steps": 300}, 300, "", program))
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:].split("  ")[0] for line in lines] == [
        f"{program} logs {run}",
        f"{program} resume {run} --steps 600",
        f"{program} list",
    ]


def test_summary_names_the_export_of_the_run_and_one_that_failed() -> None:
    summary = {"run": "x", "outcome": "completed", "export": {"step": 8, "path": "/runs/x/exports/step-8"}}
    shown = drawn(summary_view(summary | {"export_failure": "step 12: the disk is full"}), 80)
    assert "exported  step 8: /runs/x/exports/step-8" in shown
    assert "export    failed: step 12: the disk is full" in shown
    assert "export" not in drawn(summary_view({"run": "x", "outcome": "completed"}), 80)


def test_status_names_the_folders_with_the_weights() -> None:
    folders = ModelFolders(ModelFolder(12, "/runs/x/checkpoints/step-12.1.0"), None, "step 12: full")
    state = Story().works().recorded()
    lines = drawn(status_view(state, state.at, 80, folders=folders), 80).splitlines()
    assert "checkpoint  step 12: /runs/x/checkpoints/step-12.1.0" in lines
    assert "export      failed: step 12: full" in lines
    assert "checkpoint" not in drawn(status_view(state, state.at, 80), 80)


def test_summary_with_missing_values_is_shown_with_dashes() -> None:
    summary: dict[str, Any] = {
        "run": "x",
        "outcome": "failed",
        "why": "no nodes",
        "steps": 0,
        "reward_first10": None,
        "reward_last10": None,
        "faults": 0,
        "ettr": None,
        "run_seconds": None,
        "run_dir": "/runs/x",
        "recoveries": [{"replica": "rollout/0", "incarnation": 2, "detect_s": None}],
    }
    matches_stored("summary_with_holes", drawn(summary_view(summary), 80))
    drawn(summary_view({}), 80)


@pytest.mark.parametrize(("share", "shown"), [(0.5, False), (0.62, True)])
def test_status_warns_if_most_groups_are_dropped_for_their_age(share: float, shown: bool, story: Story) -> None:
    metrics = {"reward": 0.5, "stale_groups": 40.0, "stale_share": share}
    story.record(StepCommitted(story.incarnation("trainer/0"), 30, metrics))
    picture = drawn(status_view(story.recorded(), story.now, 80), 80)
    assert ("stale       62% of all groups are dropped: older than [sampling] staleness" in picture) is shown


def test_status_always_shows_the_age_of_trained_tokens_and_what_the_trainer_waits_for(story: Story) -> None:
    assert "age p50" not in drawn(status_view(story.recorded(), story.now, 100), 100)
    ages = {"reward": 0.5, "token_age_p50": 1.0, "token_age_max": 3.0, "token_age_run_max": 3.0}
    story.record(StepCommitted(story.incarnation("trainer/0"), 30, ages))
    story.record(
        NoteChanged(
            story.incarnation("trainer/0"), "the trainer waits for group 412: step 96 is the last that may train it"
        )
    )
    picture = drawn(status_view(story.recorded(), story.now, 100), 100)
    assert "tokens      age p50 1, max 3 training steps" in picture
    assert "note        trainer/0: the trainer waits for group 412: step 96 is the last that may train it" in picture
    assert "token_age" not in picture, "the age of tokens is also among the other metrics"


def test_status_names_the_weight_transport_and_its_failure(story: Story) -> None:

    def serves(replica: str, at: str) -> str:
        joined = Joined(story.incarnation(replica), NodeName(NODES[replica]), NODES[replica], 124, weight_address=at)
        return drawn(status_view(story.record(joined).recorded(), story.now, 80), 80)

    assert "weights     over ucx" in serves("trainer/0", "ucx://10.0.0.2:7001")
    assert "over tcp and ucx" in (mixed := serves("rollout/0", "tcp://10.0.0.3:7001"))
    assert "cannot pull" not in mixed
    assert "over nixl, tcp and ucx; not all of these can exchange weights" in serves(
        "rollout/1", "nixl://10.0.0.4:7001"
    )


def test_status_and_summary_show_the_number_of_unscored_groups_if_there_are_any() -> None:
    def status(**metrics: float) -> str:
        story = Story().works()
        story.record(StepCommitted(story.incarnation("trainer/0"), 30, {"reward": 0.5, **metrics}))
        return drawn(status_view(story.recorded(), story.now, 140), 140)

    text = "12 groups were dropped (54.5%): an answer could not be scored, see the log of the reward role"
    assert f"dropped     {text}" in status(unscored_groups=12.0, unscored_share=0.5454)
    assert "unscored" not in status(unscored_groups=12.0, unscored_share=0.5454)
    assert "dropped" not in status()
    assert text in drawn(summary_view({"unscored_groups": 12, "unscored_share": 0.5454}), 120)
    assert "1 group was dropped (0.1%)" in drawn(summary_view({"unscored_groups": 1, "unscored_share": 0.001}), 120)
    assert "dropped" not in drawn(summary_view({"unscored_groups": 0, "unscored_share": 0.0}), 120)


METRICS = (
    "reward",
    "loss",
    "unscored_groups",
    "unscored_share",
    "stale_share",
    "tokens",
    "longest_expected",
    "long_groups",
    "recall20",
    "length_bias",
    "token_age_p50",
    "token_age_max",
    "episodes_at_work",
    "episodes_finished",
    "branches",
    "token_drift",
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from(METRICS), st.floats()), max_size=3))
def test_status_is_shown_with_any_reported_metrics(metrics: list[dict[str, float]]) -> None:
    story = Story().works()
    for step, each in enumerate(metrics, 30):
        story.record(StepCommitted(story.incarnation("trainer/0"), step, each))
    assert "trainer" in drawn(status_view(story.recorded(), story.now, 140), 140)


def test_summary_shows_the_number_of_stale_groups_if_there_are_any() -> None:
    reported = drawn(summary_view({"stale_groups": 7, "stale_share": 0.0123}), 100)
    assert "7 groups, 1.2% of those generated, were dropped: older than [sampling] staleness allows" in reported
    assert "stale" not in drawn(summary_view({"stale_groups": 0, "stale_share": 0.0}), 100)


def test_list_of_runs_equals_the_snapshot() -> None:
    blank = RunState("quick-1120-070000", "quick", None, "submitted", 0, 40, None, 0, None, None, None, "")
    before: dict[str, Any] = {
        "standing": "completed",
        "started": BEGAN - 90000,
        "ended": BEGAN - 82000,
        "run_seconds": 8000.0,
    }
    states = [
        blank,
        msgspec.structs.replace(
            blank, run="quick-1120-064114", standing="running", step=12, reward=0.5, started=BEGAN, run_seconds=60.0
        ),
        msgspec.structs.replace(blank, run="small-1119-000000", step=40, reward=0.93, recoveries=2, **before),
        msgspec.structs.replace(blank, run="tools-1119-000000", steps=0, **before),
    ]
    matches_stored("runs", drawn(runs_view(states, BEGAN + 60), 80))


def test_failures_whose_successors_never_joined_have_names_of_their_own(tmp_path: Path, story: Story) -> None:
    for _ in range(2):
        story.loses("rollout/0")
        story.fences("rollout/0", "ImportError").launches("rollout/0", "n4")
    summary = summary_of(story.ends(Outcome.FAILED, "two starts failed").written(tmp_path))
    assert summary is not None
    lines = drawn(summary_view(summary), 80).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("rollout/0#")] == ["rollout/0#1", "rollout/0#2"]
    assert "↻ rollout/0#1  restart in place on n3; ImportError" in lines
    assert not [line for line in lines if "→ #" in line]


def test_the_pause_before_a_resume_is_no_run_time(tmp_path: Path) -> None:
    story = Story().works().ends(Outcome.FAILED, "no time left")
    worked = story.at
    story.wait(5000).record(Resumed("ada", "c1", story.job)).wait(7)
    assert story.recorded().run_seconds(story.now) == worked + 7
    assert f"{span(worked + 7)}\n" in drawn(status_view(story.recorded(), story.now, 80), 80)
    story.record(RunEnded(Outcome.CANCELLED, "cancelled by ada"))
    summary = summary_of(story.written(tmp_path))
    assert summary is not None
    assert summary["run_seconds"] == story.recorded().run_seconds(story.now + 900) == worked + 7


def test_durations_have_at_most_two_units() -> None:
    assert [span(s) for s in (-1, 0.9, 59, 60, 134, 3600, 11100, 187200)] == [
        "0s",
        "0s",
        "59s",
        "1m00s",
        "2m14s",
        "1h00m",
        "3h05m",
        "2d04h",
    ]
    assert [stage(s) for s in (None, 0.123, 99.9, 150)] == ["–", "0.12s", "99.90s", "2m30s"]


def test_curve_has_one_block_per_value_and_covers_the_whole_range() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([-5.0, 0.0, 5.0]) == "▁▅█"
    assert curve([3.0, 3.0]) == "▁▁"
    assert curve([]) == ""


@pytest.mark.parametrize(
    ("values", "columns", "expected"),
    [
        ([1.0, 2.0], 4, [1.0, 1.0, 2.0, 2.0]),
        ([1.0, 2.0], 3, [1.0, 1.5, 2.0]),
        ([1.0, 2.0, 4.0, 6.0], 2, [1.5, 5.0]),
        ([1.0, 2.0, 6.0], 2, [4 / 3, 14 / 3]),
        ([float("nan"), 2.0], 1, [2.0]),
        ([1.7e308, 1.7e308], 1, [1.7e308]),
        ([], 5, []),
    ],
)
def test_values_are_resampled_to_means_of_equal_shares(
    values: list[float], columns: int, expected: list[float]
) -> None:
    assert resampled(values, columns) == pytest.approx(expected)


@given(st.lists(st.floats(), min_size=1, max_size=300), st.integers(1, 200))
def test_resampling_gives_a_value_for_each_column_within_the_range(values: list[float], columns: int) -> None:
    means = resampled(values, columns)
    finite = [value for value in values if math.isfinite(value)]
    assert len(means) == len(curve(means)) == columns
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    for mean in (mean for mean in means if not math.isnan(mean)):
        assert low <= mean <= high or math.isclose(mean, low) or math.isclose(mean, high)


def test_a_bar_is_full_only_at_the_end() -> None:
    assert [len(bar(done, 40, 24)[0]) for done in (0, 39, 40, 99)] == [0, 23, 24, 24]
    assert len("".join(bar(3, 0, 24))) == 24


def test_node_names_are_folded_or_at_least_listed() -> None:
    assert folded(["n3", "n1", "n2", "gpu7"]) == "gpu7,n[1-3]"
    assert folded(["n1", "odd[name"]) == "n1,odd[name"
    assert folded([]) == ""


def test_run_whose_replicas_work_is_running_although_a_node_is_still_lost() -> None:
    story = node_lost()
    assert standing(story.recorded()) == "recovering"
    story.wait(0.2).launches("rollout/1", "n2").joins("rollout/1", "generate")
    assert standing(story.recorded()) == "running"


def test_exclusion_held_back_by_the_breaker_shows_node_time_reason_and_finding() -> None:
    story = Story().works().loses_node("n3").wait(100)
    (lost,) = story.recorded().findings.values()
    story.record(Decided(Exclude(NodeName("n4"), Why(("node lost: silent",)))))
    story.record(FindingChanged(msgspec.structs.replace(lost, node=NodeName("n5"), since=story.now)))
    shown = drawn(status_view(story.recorded(), story.now, 180), 180)
    why = "2 of 5 nodes excluded within 600 s, and no more may be excluded"
    assert f"breaker     n5 stays in use for 8m20s: {why}" in shown
    assert "(node lost: manager: agent and all replicas silent for 10 s)" in shown
    assert "breaker" not in drawn(status_view(node_lost().recorded(), story.now, 180), 180)


@pytest.mark.parametrize(("every", "shown"), [(1, "step 12/40 "), (5, "step 12/40 (trained: 14) ")])
def test_steps_that_were_trained_and_not_committed_are_shown_beside_the_committed_ones(every: int, shown: str) -> None:
    job = msgspec.structs.replace(job_view(), trainer=TrainerSettings(checkpoint_every=every))
    story = Story(job=job).works()
    trainer = story.incarnation("trainer/0")
    story.record(VersionAvailable(trainer, Version(14, trainer.number)))
    assert shown in drawn(status_view(story.recorded(), story.now, 120), 120)
