"""Output of Slurm's commands (recorded on 22.05.8 in the lab), and output that cannot be parsed."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from rrl.cluster.base import AllocationState, NodeState
from rrl.cluster.slurm.parsing import (
    Job,
    JobEnd,
    NodeInfo,
    Unreadable,
    estimated_start,
    managed_runs,
    read_config,
    read_jobs,
    read_node_infos,
    read_nodes,
    read_steps,
)
from rrl.core.drains import DrainOwner
from rrl.core.types import NodeName


def recorded(name: str) -> str:
    return (Path(__file__).parents[3] / "data" / "recorded" / "slurm" / f"{name}-22.05.txt").read_text()


def jobs(name: str) -> dict[str, Job]:
    return {job.id: job for job in read_jobs(recorded(name))}


def test_running_pool_has_its_nodes_and_its_tag() -> None:
    pool = jobs("jobs")["37"]
    nodes = (NodeName("n1"), NodeName("n2"))
    assert pool.target == ("--jobid=37",)
    assert pool == Job(
        "37", AllocationState.RUNNING, nodes, "demo.pool", "RUNNING", "rrl demo demo.pool", time_left_s=3598.0
    )


def test_pending_job_has_its_reason() -> None:
    pending_jobs = jobs("jobs")
    assert (pending_jobs["40"].state, pending_jobs["40"].nodes) == (AllocationState.PENDING, ())
    assert pending_jobs["40"].detail == "PENDING: Resources"
    assert pending_jobs["41"].detail == "PENDING: PartitionConfig"
    assert pending_jobs["41"].comment == ""


def test_components_have_own_ids_tags_and_nodes_and_are_addressed_by_their_leader() -> None:
    components = jobs("hetjobs")
    assert (components["62"].name, components["62"].nodes, components["62"].leader) == (
        "demo.rollout",
        ("n3", "n4"),
        "61",
    )
    assert components["61"].target == ("--jobid=61", "--het-group=0")
    assert components["62"].target == ("--jobid=61", "--het-group=1")
    steps = {step.name: (step.job, step.nodes) for step in read_steps(recorded("hetsteps"))}
    assert steps == {"demo.x-0.1": ("61", ("n1",)), "demo.x-1.1": ("62", ("n3",))}


def test_job_that_never_starts_by_itself_has_its_reason() -> None:
    assert jobs("jobs")["41"].unsatisfiable_reason == ""  # its reason PartitionConfig may pass
    assert jobs("jobs")["40"].unsatisfiable_reason == ""
    # PartitionNodeLimit, but the job is cancelled and so not pending
    assert jobs("jobs")["13"].unsatisfiable_reason == ""


def test_managed_runs_exclude_one_whose_first_manager_is_pending() -> None:
    def job(state: AllocationState, comment: str) -> Job:
        return Job("1", state, (), "x", "", comment)

    pending, running, ended = AllocationState.PENDING, AllocationState.RUNNING, AllocationState.ENDED
    assert managed_runs(
        [
            job(running, "rrl a manager"),
            job(pending, "rrl a a.pool"),
            job(pending, "rrl b b.pool"),
            job(pending, "rrl c manager"),
            job(ended, "rrl d manager"),
            job(running, "somebody else's"),
            job(running, "rrl"),
        ]
    ) == {"a", "b"}


def test_long_reason_with_commas_and_spaces_stays_in_its_field() -> None:
    assert jobs("jobs-after-crash")["40"].detail.endswith("reserved for jobs in higher priority partitions")


def test_completing_and_every_end_state_count_as_ended() -> None:
    ended = jobs("jobs")
    assert {ended[job].detail.split(":")[0] for job in ("38", "39", "42")} == {"COMPLETING", "FAILED", "COMPLETED"}
    assert {ended[job].state for job in ("13", "36", "38", "39", "42")} == {AllocationState.ENDED}
    assert {ended[job].end for job in ("38", "39", "42")} == {JobEnd.COMPLETING, JobEnd.OTHER}


@pytest.mark.parametrize(
    ("state_name", "end"),
    [
        ("PREEMPTED", JobEnd.RECLAIMED),
        ("TIMEOUT", JobEnd.RECLAIMED),
        ("DEADLINE", JobEnd.RECLAIMED),
        ("CANCELLED", JobEnd.CANCELLED),
        ("COMPLETING", JobEnd.COMPLETING),
        ("NODE_FAIL", JobEnd.OTHER),
        ("RUNNING", None),
        ("PENDING", None),
    ],
)
def test_each_end_state_maps_to_a_job_end(state_name: str, end: JobEnd | None) -> None:
    assert _line(state_name, "59:58", "1:00:00", "1795178747", "1795182347").end is end


def test_drain_reason_is_parsed_apart_from_the_state() -> None:
    line = "NodeName=n1 Arch=x86_64 State=IDLE+DRAIN ThreadsPerCore=1 Reason=rrl:run-1:gpu: Xid 79 [root@2026-11-22]"
    status = read_nodes(line)[NodeName("n1")]
    assert (status.state, status.reason) == (NodeState.DRAINING, "rrl:run-1:gpu: Xid 79")


@pytest.mark.parametrize(
    "reason",
    ["Foo=1 Comment=2 [me@2020-01-01T00:00:00] State=IDLE", "[root@nowhere]", "Xid 79, [GPU 3] fell = off", "Reason="],
)
def test_odd_drain_reason_ends_where_its_author_and_time_begin(reason: str) -> None:
    line = f"NodeName=n1 State=IDLE+DRAIN ThreadsPerCore=1 Reason={reason} [root@2026-11-22T09:08:07]"
    assert read_nodes(line)[NodeName("n1")].reason == reason
    assert read_node_infos(line)[NodeName("n1")] == NodeInfo("IDLE+DRAIN", reason, "root@2026-11-22T09:08:07")


def test_partitions_gpus_boot_and_owner_of_a_drain_are_read_from_a_node() -> None:
    line = (
        "NodeName=n1 Gres=gpu:h100:8(S:0-1),nic:4 State=IDLE+DRAIN Partitions=a,b BootTime=2026-11-22T01:00:00"
        " Reason=rrl:health: Xid 79 [root@2026-11-22T09:08:07]"
    )
    info = read_node_infos(f"{line}\nNode n9 not found\nNodeName=n2 Gres=(null) State=IDLE BootTime=None\n")
    assert list(info) == ["n1", "n2"]
    n1, n2 = info.values()
    assert (n1.partitions, n1.gpus, n1.booted) == (("a", "b"), 8, datetime(2026, 11, 22, 1).timestamp())
    assert (n1.drain_owner, n1.reason_at) == (DrainOwner.HOOK, datetime(2026, 11, 22, 9, 8, 7).timestamp())
    assert n2 == NodeInfo("IDLE", "", "")


def test_bars_quotes_and_line_ends_in_a_job_name_are_parsed() -> None:
    job = jobs("jobs")["42"]
    assert (job.name, job.comment) == ("odd | name\ndemo.pool", 'a|b "c" d')


def test_lost_node_leaves_the_job_and_its_step_stays_listed() -> None:
    assert jobs("jobs-after-crash")["37"].nodes == ("n1",)
    assert {step.name: step.nodes for step in read_steps(recorded("steps-after-crash"))}["demo.agent-n2.1"] == ("n2",)


def test_numbered_steps_are_parsed_and_the_batch_step_is_skipped() -> None:
    steps = {step.id: (step.job, step.name) for step in read_steps(recorded("steps"))}
    assert steps == {
        "37.0": ("37", "demo.agent-n1.1"),
        "37.1": ("37", "demo.agent-n2.1"),
        "37.2": ("37", "demo.rollout-0.2"),
    }


def test_node_states_include_slurms_own_text() -> None:
    nodes = {name: (status.state, status.detail) for name, status in read_nodes(recorded("nodes")).items()}
    assert nodes == {
        "n1": (NodeState.DRAINING, "MIXED+DRAIN: admin: look"),
        "n2": (NodeState.DOWN, "DOWN+NOT_RESPONDING: Not responding"),
        "n3": (NodeState.DRAINING, "IDLE+DRAIN: disk | is full"),
        "n4": (NodeState.DOWN, "DOWN: broken"),
        "n5": (NodeState.UP, "IDLE"),
    }


def test_node_that_does_not_respond_yet_is_unknown() -> None:
    status = read_nodes(recorded("nodes-not-responding"))[NodeName("n2")]
    assert (status.state, status.detail) == (NodeState.UNKNOWN, "MIXED+NOT_RESPONDING")


def test_node_that_slurm_does_not_know_is_unknown() -> None:
    assert read_nodes(recorded("nodes-not-responding"))[NodeName("n9")].state is NodeState.UNKNOWN


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error: something new",
        "\x1e37\x1fRUNNING\x1fn1",
        "\x1e37\x1fDREAMING\x1fn1\x1fa\x1fNone\x1fx\n",
        "\x1e37\x1fRUNNING\x1fn[1-\x1fa\x1fNone\x1fx\n",
    ],
)
def test_unknown_output_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        read_jobs(text)


def test_empty_output_is_a_valid_answer() -> None:
    assert read_jobs("") == []
    assert read_steps("") == []


def test_configuration_is_parsed_with_the_cgroup_settings_that_follow() -> None:
    recorded = (Path(__file__).parents[3] / "data/recorded/doctor/config-22.05.txt").read_text()
    values = read_config(recorded + "\nCgroup Support Configuration:\nConstrainDevices        = yes\n")
    assert (values["SLURM_VERSION"], values["InactiveLimit"], values["SlurmUser"]) == ("22.05.8", "0 sec", "root(0)")
    assert values["JobSubmitPlugins"] == ""  # (null)
    assert values["SchedulerParameters"] == "sched_interval=2,sched_min_interval=0,bf_interval=2"
    assert values["ConstrainDevices"] == "yes"
    with pytest.raises(Unreadable, match="slurm_load_ctl_conf error"):
        read_config("slurm_load_ctl_conf error\n")


# ── time left, and preemption (recorded on 22.05.8: a job of an hour, two seconds old) ───────────────────────────────
def _line(state: str, left: str, limit: str, start: str, end: str, reason: str = "None") -> Job:
    fields = ("7", "7", state, "n1", "demo.pool", reason, left, limit, start, end, "rrl demo demo.pool")
    (job,) = read_jobs("\x1e" + "\x1f".join(fields) + "\n")
    return job


def test_running_job_has_its_time_left() -> None:
    job = _line("RUNNING", "59:58", "1:00:00", "1795178747", "1795182347")
    assert (job.time_left_s, job.reclaimed) == (3598.0, False)


def test_preempted_job_is_recognised_by_its_earlier_expected_end() -> None:
    job = _line("RUNNING", "59:58", "1:00:00", "1795178747", "1795178755")
    assert (job.state, job.time_left_s, job.reclaimed) == (AllocationState.RUNNING, 6.0, True)
    assert _line("SIGNALING", "59:58", "1:00:00", "1795178747", "1795178755").reclaimed


def test_job_that_was_suspended_is_not_taken_for_preempted() -> None:
    job = _line("RUNNING", "59:50", "1:00:00", "1795178747", "1795182355")
    assert (job.time_left_s, job.reclaimed) == (3590.0, False)
    assert _line("SUSPENDED", "59:58", "1:00:00", "1795178747", "1795182347").state is AllocationState.SUSPENDED


def test_job_without_limit_or_with_times_not_in_seconds_has_no_known_end() -> None:
    assert _line("RUNNING", "UNLIMITED", "UNLIMITED", "1795178747", "NONE").time_left_s is None
    assert _line("RUNNING", "59:58", "1:00:00", "2026-11-20T12:00:00", "2026-11-20T13:00:00").time_left_s is None
    assert _line("RUNNING", "INVALID", "1:00:00", "1795178747", "1795182347").time_left_s is None


@pytest.mark.parametrize(("reason", "holder"), [("JobHeldAdmin", "an administrator"), ("JobHeldUser", "its user")])
def test_held_job_names_its_holder_and_may_still_start(reason: str, holder: str) -> None:
    job = _line("PENDING", "1:00:00", "1:00:00", "N/A", "NONE", reason)
    assert (job.unsatisfiable_reason, job.detail) == ("", f"PENDING: held by {holder} (scontrol release)")


def test_start_that_sbatch_estimates_is_read() -> None:
    line = "sbatch: Job 1 to start at 2026-11-20T09:19:27 using 2 processors on nodes n1 in partition main\n"
    assert estimated_start(line) == "2026-11-20T09:19:27"
    assert estimated_start(line + line.replace("09:19", "11:30")) == "2026-11-20T11:30:27"
    assert estimated_start("allocation failure: Requested node configuration is not available") is None
