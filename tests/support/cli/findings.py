"""Facts of ``rrl doctor`` about a healthy cluster; tests change single facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rrl.cli.doctor.facts import Config, DoctorOptions, Facts, Reader, Slurm, Storage, Trials, Visit
from rrl.cli.doctor.node_probe.host import (
    Dcgm,
    Host,
    Interface,
    Limits,
    Machine,
    Network,
    Nvml,
    Python,
    Scratch,
    Torch,
    Ucx,
)
from rrl.cli.doctor.node_probe.main import NodeReport, Reached
from rrl.cluster.slurm.parsing import read_config
from rrl.cluster.slurm.requests import Partition, Shape
from rrl.cluster.slurm.site import Accounts, JobLimits
from rrl.core.command_runner import CommandResult
from rrl.core.types import Resources

GIB = 2**30
RECORDED = Path(__file__).parents[2] / "data" / "recorded" / "doctor"
TAKEN = CommandResult(
    0, "", "sbatch: Job 7 to start at 2026-11-20T09:19:27 using 2 processors on n[1-2] in partition gpu"
)
REFUSED = CommandResult(
    1, "", "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name\n"
)
ETH0 = Interface("eth0", "10.1.0.5", "10.1.0.0/16")
IB0 = Interface("ib0", "10.2.0.5", "10.2.0.0/16")
LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")


def host(name: str = "login1", **other: Any) -> Host:
    good = Host(
        network=Network(name, "10.1.0.5", "10.1.0.5", "", "", (LO, ETH0)),
        limits=Limits(-1, 65536, 65536, 0, "|/usr/lib/systemd/systemd-coredump"),
        machine=Machine(32, 256 * GIB, 200 * GIB),
        python=Python(
            "/home/u/venv/bin/python",
            "3.11.2",
            "/home/u/venv",
            "nfs4",
            {
                "rrl-slurm": "0.1.0",
                "torch": "2.13.0",
                "transformers": "5.19.0",
                "reasoning-gym": "0.1.25",
                "ucxx-cu12": "0.52.0",
            },
        ),
        ucx=Ucx("1.21.0", {"tcp": ("eth0", "lo"), "self": ("memory",)}, "the wheel libucx"),
        nvml=Nvml("", ()),
        dcgm=Dcgm("", False),
        scratch=Scratch("/tmp", "ext4", 100 * GIB, "", 100 * GIB),
    )
    return msgspec.structs.replace(good, **other)


def config(**values: str) -> Config:
    """Return the settings of Slurm 22.05 in its own format, with accounting and cgroups as most sites have them."""
    usual = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageEnforce": "associations,limits",
        "TaskPlugin": "task/cgroup,task/affinity",
        "SlurmUser": "slurm(64030)",
        "KillWait": "30 sec",
        "ClusterName": "big",
    }
    return Config(read_config((RECORDED / "config-22.05.txt").read_text()) | usual | values, seconds=0.02)


def shape(count: int, *, cpus: int = 64, mem: int = 500 * GIB, usable: bool = True, **gpus: int) -> Shape:
    """Return nodes of one kind, with 8 H100 unless other GPUs are given."""
    gpus = gpus or {"h100": 8}
    return Shape(count, Resources(cpus, sum(gpus.values()), mem), gpus, usable)


def partition(*shapes: Shape, **other: Any) -> Partition:
    """Return the default partition."""
    good = Partition("gpu", True, shapes, 7 * 86400.0, float("inf"), up=True, preempted=False)
    return msgspec.structs.replace(good, **other)


def accounts(admin: str, default: str, *names: str) -> Accounts:
    return Accounts(admin, default, tuple({"account": name} for name in names))


def slurm(**other: Any) -> Slurm:
    good = Slurm(
        config=config(),
        partitions=(
            partition(shape(6)),
            partition(
                Shape(1, Resources(64, 0, 500 * GIB), {}, True), name="cpu", default=False, max_walltime_s=float("inf")
            ),
        ),
        accounts=accounts("Administrator", "astro", "astro"),
        limits=JobLimits((), "", 40000),
        trials=Trials({"pool": TAKEN, "replica": TAKEN, "hetjob": TAKEN}, {"gpu": TAKEN}),
        cgroups=Config({"ConstrainDevices": "yes", "ConstrainRAMSpace": "yes"}, "/etc/slurm/cgroup.conf"),
        reader=Reader("the commands: pyslurm is not installed", False),
    )
    return msgspec.structs.replace(good, **other)


def report(**other: Any) -> NodeReport:
    reached = (Reached("10.1.0.5:4000", skew=0.003, bound=0.001),)
    good = NodeReport("n1", "", "/home/u/rrl", host("n1"), Torch("2.13.0", 1, 2.5), TAKEN, reached, "")
    return msgspec.structs.replace(good, **other)


def visit(**other: Any) -> Visit:
    return Visit(report(**other), 0.2)


def storage(**other: Any) -> Storage:
    good = Storage("/home/u/rrl-runs", "/home/u/rrl-runs", "nfs4", 900 * GIB, 10**8, True, 0.004, "")
    return msgspec.structs.replace(good, **other)


def facts(**other: Any) -> Facts:
    good = Facts("u", 1000, DoctorOptions(), host(), storage(), slurm(), visit())
    return msgspec.structs.replace(good, **other)
