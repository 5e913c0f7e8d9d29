"""The largest numbers of jobs and steps of a run, and the preview, which shows the requests that the planner makes."""

from __future__ import annotations

import msgspec
import pytest

from rrl.core.run_spec import ManagerSpec, NodeGroup, Recovery, RoleKind, RoleSpec, RunSpec, TagsSpec
from rrl.core.types import Resources
from rrl.manager.bootstrap.preview import allocations, demand, max_standbys, pool_lines, preview, worst_case
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Request
from rrl.manager.model.reducer import fold
from rrl.manager.planner import plan
from rrl.manager.planner.capacity.allocation_requests import initial_requests

NODE = Resources(cpus=2, mem=2**30)


def role(name: str, kind: RoleKind, replicas: int, floor: int, exclusive: bool) -> RoleSpec:
    return RoleSpec(name, kind, replicas, floor, Resources(), exclusive, ("true",))


ROLES = (
    role("trajectories", "trajectories", 1, 1, False),
    role("trainer", "trainer", 1, 1, True),
    role("rollout", "rollout", 3, 1, True),
)


def node_groups(separate: bool) -> tuple[NodeGroup, ...]:
    return (
        NodeGroup("rollout", ("rollout",), 3, NODE, 7200.0, {"exclusive": ""}, separate, 1 if separate else 3),
        NodeGroup("shared", ("trajectories",), 1, NODE, min_nodes=1),
        NodeGroup("trainer", ("trainer",), 1, NODE, sbatch={"exclusive": ""}, separate_jobs=separate, min_nodes=1),
    )


def run_spec(form: str) -> RunSpec:
    pool = (NodeGroup("pool", ("trajectories", "trainer", "rollout"), 6, NODE, min_nodes=6),)
    return RunSpec(
        "small",
        10,
        "slurm",
        ROLES,
        pool if form == "pool" else node_groups(form == "replica"),
        form=form,
        spares=1 if form == "pool" else 0,
    )


def test_pool_counts_one_job_plus_managers_and_a_replacement_for_each_node() -> None:
    worst = worst_case(run_spec("pool"))
    assert (worst.jobs_to_start, worst.jobs) == (2, 2 + 1 + 6)
    assert worst.steps == 5 + 6


def test_each_rank_and_each_standby_counts_as_a_step() -> None:
    trainer = msgspec.structs.replace(ROLES[1], ranks=4, per_node=2, warm=True)
    gang = msgspec.structs.replace(run_spec("pool"), roles=(ROLES[0], trainer, ROLES[2]))
    # a standby process beside each rank; two each on as many other nodes as the trainer has
    assert max_standbys(gang) == 4 + 2 * 2
    assert max_standbys(msgspec.structs.replace(gang, tags=TagsSpec(("train",), ()))) == 4 + 2  # on the spare only
    assert worst_case(gang).steps == (1 + 4 + 3) + 6 + max_standbys(gang)
    assert max_standbys(msgspec.structs.replace(gang, recovery=Recovery(policy="job"))) == 0


def test_separate_jobs_count_all_replicas_and_only_the_minimum_at_the_start() -> None:
    worst = worst_case(run_spec("replica"))
    assert worst.jobs == 2 + 5 + 5
    assert worst.jobs_to_start == 1 + (1 + 1 + 1)


def test_heterogeneous_components_count_as_jobs() -> None:
    assert worst_case(run_spec("hetjob")).jobs_to_start == 1 + 3


def test_manager_in_the_foreground_or_in_the_pool_is_not_a_job() -> None:
    within = RunSpec("small", 10, "slurm", ROLES, run_spec("pool").node_groups, manager=ManagerSpec("pool"))
    assert worst_case(run_spec("pool"), foreground=True).jobs_to_start == worst_case(within).jobs_to_start == 1


def test_jobs_per_hour_include_six_windows_of_losses_restarts_and_rotations() -> None:
    hour = worst_case(run_spec("replica"))
    assert (
        hour.jobs_per_hour == 2 + 5 + 6 * 2 + 3
    )  # managers, allocations, two of five nodes lost in each of six windows, and rotations of rollouts
    assert hour.steps_per_hour == (5 + 5) * (1 + 6 * 10)


def test_preview_and_preflight_match_the_planners_requests() -> None:
    for form in ("pool", "replica", "hetjob"):
        state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted("small-7", run_spec(form))))
        state = fold(state, ev.Stamped(2, 0.0, 1, ev.ManagerStarted("host", 1, "")))
        requests = [action.request for action in plan(state, 0.0).actions if isinstance(action, Request)]
        assert tuple(requests) == initial_requests("small-7", run_spec(form)), form


def test_demand_counts_gpu_hours_of_all_nodes_for_the_whole_walltime() -> None:
    node = Resources(cpus=8, gpus=4, mem=2**30)
    pool = NodeGroup("pool", ("trajectories", "trainer", "rollout"), 6, node, 7200.0, min_nodes=6)
    spec = msgspec.structs.replace(run_spec("pool"), node_groups=(pool,), walltime=7200.0)
    asked = demand(spec)
    assert (asked.nodes, asked.spares, asked.gpus, asked.cpus) == (6, 1, 24, 48)
    assert (asked.gpu_hours, asked.core_hours) == (48.0, 96.0)
    assert (asked.jobs_to_start, asked.jobs) == (worst_case(spec).jobs_to_start, worst_case(spec).jobs)
    local = demand(msgspec.structs.replace(spec, cluster="local"))
    assert (local.jobs_to_start, local.jobs) == (0, 0)


def test_allocations_that_are_renewed_overlap_in_the_hours_of_a_run() -> None:
    pool = NodeGroup("pool", ("trainer",), 1, Resources(gpus=1), 3600.0, min_nodes=1)
    spec = msgspec.structs.replace(run_spec("pool"), node_groups=(pool,), walltime=3 * 3600.0)
    spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, rotate=600.0))
    assert demand(spec).gpu_hours == 3 + 2 * 600 / 3600
    spec = msgspec.structs.replace(spec, limits=msgspec.structs.replace(spec.limits, rotate=7200.0))
    assert demand(spec).gpu_hours == 3 + 2 * 0.5, (
        "the overlap of two allocations is not limited to half of an allocation"
    )


# ── further rollout pools ────────────────────────────────────────────────────────────────────────────────────────────
def with_pools(form: str, hours: float = 200.0) -> RunSpec:
    """Return a job with a pool of two rollouts on nodes of 16 GPUs, and an elastic pool of up to twelve."""
    spec, big = run_spec(form), Resources(cpus=8, gpus=16, mem=2**30)
    fixed = role("h20", "rollout", 2, 0, True)
    elastic = msgspec.structs.replace(role("burst", "rollout", 0, 0, True), max_replicas=12, node_seconds=3600 * hours)
    h20 = NodeGroup("h20", ("h20",), 2, big, sbatch={"partition": "h20"}, separate_jobs=True, dedicated=True)
    burst = NodeGroup("burst", ("burst",), 0, NODE, 7200.0, {"partition": "preempt"}, True, dedicated=True)
    return msgspec.structs.replace(
        spec, roles=(*spec.roles, fixed, elastic), node_groups=(*spec.node_groups, h20, burst)
    )


@pytest.mark.parametrize("form", ["pool", "replica", "hetjob"])
def test_pools_add_their_most_jobs_but_none_to_the_start(form: str) -> None:
    without, worst = worst_case(run_spec(form)), worst_case(with_pools(form))
    assert worst.jobs_to_start == without.jobs_to_start
    assert worst.jobs == without.jobs + 2 * 2 + 12, "a node of h20 may have a replacement, one of burst has none"
    assert worst.steps == without.steps + 2 * (2 + 12)
    # burst requests each of its jobs, and one more of each after two hours; lost nodes are a share of all nodes
    assert worst.jobs_per_hour >= without.jobs_per_hour + 2 + 12 + 12


def test_budget_limits_the_hours_of_an_elastic_pool() -> None:
    without, with_burst = demand(run_spec("pool")), demand(with_pools("pool"))
    assert with_burst.nodes == without.nodes + 2 + 12
    assert with_burst.gpus == 2 * 16
    assert with_burst.gpu_hours == 2 * 16 * 24
    assert with_burst.core_hours == without.core_hours + 2 * 8 * 24 + 200 * 2
    ample = demand(with_pools("pool", hours=1e6))
    assert ample.core_hours < without.core_hours + 2 * 8 * 24 + 12 * 2 * 36, "beyond all nodes for the walltime"


def test_each_pool_is_described_in_one_line() -> None:
    assert list(pool_lines(with_pools("pool"))) == [
        "h20: 2 nodes of partition h20, each job at most 1d",
        "burst: 0 to 12 nodes of partition preempt, at most 200 node hours, each job at most 2h",
    ]
    assert list(pool_lines(run_spec("pool"))) == []
    local = msgspec.structs.replace(with_pools("pool"), cluster="local")
    assert list(pool_lines(local))[1] == "burst: 0 to 12 nodes of partition preempt, at most 200 node hours"


@pytest.mark.parametrize(("form", "where"), [("pool", "job"), ("pool", "pool"), ("replica", "job"), ("hetjob", "job")])
def test_script_of_a_pool_without_nodes_is_shown(form: str, where: str) -> None:
    spec = msgspec.structs.replace(with_pools(form), manager=ManagerSpec(where=where))
    shown = [(title, text) for title, text in allocations(spec) if "burst" in text]
    ((title, script),) = shown
    assert title == "allocation (sbatch; 0 to 12 of these)"
    assert "--nodes=1\n" in script
    assert "--partition=preempt\n" in script
    assert "--time=0-02:00:00\n" in script
    own = [text for title, text in allocations(spec) if "--partition=" not in text]
    assert own == [text for _, text in allocations(msgspec.structs.replace(run_spec(form), manager=spec.manager))]


def test_extras_add_steps_on_the_spares_but_no_node() -> None:
    spec = msgspec.structs.replace(run_spec("pool"), spares=2)
    with_extras = msgspec.structs.replace(spec, tags=TagsSpec(spare=("rollout", "train")))
    assert worst_case(with_extras).steps == worst_case(spec).steps + 2
    assert demand(with_extras) == demand(spec)
    (steps,) = (text for title, text in preview(with_extras) if title == "steps")
    assert "\nrollout       3 to 5 x (" in steps
