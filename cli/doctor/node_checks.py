"""Judges what a job on a compute node saw, beside what this machine is like. Pure: facts in, checks out."""

from __future__ import annotations

from ...roles.node_probe.host import Ended, Host, Network, Nvml, Python, Unread, UnreadCause
from ...roles.node_probe.main import NodeReport
from .catalogue import MEANINGS, fail, ok, unknown, warn
from .facts import Check, Facts, Visit
from .host_checks import candidates, listed, memlock, nofile, packet_filter, tmp, ucx

SKEW = 1.0
"""s between two clocks, beyond which merged logs mislead"""
SEEN = 5.0
"""s until a file from a node is seen here; commands and status wait so long"""
IMPORT = 5.0
"""s to import torch on a quiet node; a hundred nodes at once take longer"""
_SLOW = "a longer [limits] join, or the environment on a disk of the node ([env] python)"
NAMES = tuple(name for name in MEANINGS if name.startswith("node."))


def node_checks(facts: Facts) -> list[Check]:
    """Every one of them is UNKNOWN where no job could look, or none was allowed to."""
    visit = facts.node
    if visit is None:
        return []
    if isinstance(visit, Unread):
        return [unknown(name, visit, MEANINGS["node.visit"].fix) for name in NAMES]
    report, host = visit.report, visit.report.host
    return [
        ok("node.visit", f"a job on {report.node} looked around"),
        _folder(facts, report),
        _answer(visit),
        _rrl(report, facts),
        _packages(host.python, facts.host.python),
        _torch(report),
        _address(host.network, facts.host.network),
        _reach(report),
        _clock(visit),
        _sbatch(report),
        nofile("node.nofile", host.limits),
        memlock("node.memlock", host.limits, host.network, host.ucx),
        tmp("node.tmp", host.scratch),
        ucx("node.ucx", host.ucx, host.network, host.python),
        packet_filter("node.filter", host.network, host.python),
        _gpus(report),
    ]


def common_networks(one: Host, other: Host) -> dict[str, str]:
    """Networks that both machines have an address in: CIDR → interface of the first."""
    if isinstance(one.network, Unread) or isinstance(other.network, Unread):
        return {}
    return {cidr: name for cidr, name in candidates(one.network).items() if cidr in candidates(other.network)}


def _folder(facts: Facts, report: NodeReport) -> Check:
    root = facts.storage.root if not isinstance(facts.storage, Unread) else "the folder of all runs"
    if report.folder:
        return fail("node.folder", f"{root} on {report.node}: {report.folder}")
    return ok("node.folder", f"{report.node} reads in {root} what was written here")


def _answer(visit: Visit) -> Check:
    if visit.report.folder:
        return unknown("node.answer", "the node wrote nothing, for it does not see the folder")
    if visit.seen is None:
        return fail("node.answer", "what the node wrote was not seen here", MEANINGS["node.folder"].fix)
    told = f"seen here {visit.seen:.1f} s after the node was done"
    return warn("node.answer", told) if visit.seen > SEEN else ok("node.answer", told)


def _rrl(report: NodeReport, facts: Facts) -> Check:
    here, there = facts.host.python, report.host.python
    if isinstance(here, Unread) or isinstance(there, Unread):
        return unknown("node.rrl", here if isinstance(here, Unread) else there)  # type: ignore[arg-type]
    told = f"{there.executable} ({there.version}) runs rrl of {report.rrl}"
    if here.version != there.version or here.packages.get("rrl-slurm") != there.packages.get("rrl-slurm"):
        return fail("node.rrl", f"{told}; here it is Python {here.version}, rrl {here.packages.get('rrl-slurm', '?')}")
    return ok("node.rrl", told)


def _packages(there: Python | Unread, here: Python | Unread) -> Check:
    if isinstance(here, Unread) or isinstance(there, Unread):
        return unknown("node.packages", here if isinstance(here, Unread) else there)  # type: ignore[arg-type]
    names = sorted({*here.packages, *there.packages})
    differ = [f"{one} {there.packages.get(one, 'absent')} (here {here.packages.get(one, 'absent')})" for one in names
              if here.packages.get(one) != there.packages.get(one)]  # fmt: skip
    return warn("node.packages", "; ".join(differ)) if differ else ok("node.packages", f"the same {len(names)} as here")


def _torch(report: NodeReport) -> Check:
    torch, python = report.torch, report.host.python
    if isinstance(torch, Unread):
        if not isinstance(python, Unread) and "torch" not in python.packages:
            return warn("node.torch", "not installed there")
        slow = torch.cause is UnreadCause.TIMEOUT
        return warn("node.torch", f"importing it: {torch.why}", _SLOW) if slow else unknown("node.torch", torch)
    told = f"{torch.version} imports in {torch.seconds:.1f} s and sees {torch.gpus} GPUs"
    if report.slurm_gpus and not torch.gpus and _has_driver(report):
        return warn("node.torch", f"{told}; Slurm gave the job GPU {report.slurm_gpus}")
    if torch.seconds > IMPORT:
        return warn("node.torch", told, _SLOW)
    return ok("node.torch", told)


def _has_driver(report: NodeReport) -> bool:
    return isinstance(report.host.nvml, Nvml) and report.host.nvml.driver != ""


def _address(there: Network | Unread, here: Network | Unread) -> Check:
    name = "node.address"
    if isinstance(there, Unread):
        return unknown(name, there)
    if there.trouble:
        return fail(name, f"{there.host}: {there.trouble}")
    told = f"{there.host} resolves to {there.resolves or 'nothing'} there; a role listens at {there.chosen}"
    told += f" of {listed(there)}"
    if len(candidates(there)) > 1 and not there.wanted:
        both = [] if isinstance(here, Unread) else [one for one in candidates(there) if one in candidates(here)]
        shared = f"; {', '.join(both)} it shares with this machine" if both else ""
        return warn(name, f"{told}{shared}", f'[transport] network = "{both[0]}"' if both else None)
    return ok(name, told)


def _reach(report: NodeReport) -> Check:
    if not report.reached:
        return unknown("node.reach", "this machine told the node no address of its own")
    there = [one.address.rpartition(":")[0] for one in report.reached if not one.trouble]
    refused = ", ".join(f"{one.address.rpartition(':')[0]}: {one.trouble}" for one in report.reached if one.trouble)
    if not there:
        return warn("node.reach", refused)
    return ok("node.reach", f"at {', '.join(there)}{f' (not at {refused})' if refused else ''}")


def _clock(visit: Visit) -> Check:
    if visit.skew is None:
        return unknown("node.clock", "there was no connection to measure it on")
    told = f"{abs(visit.skew):.3f} s {'ahead' if visit.skew > 0 else 'behind'}, give or take {visit.bound:.3f} s"
    if visit.bound > SKEW:
        return unknown("node.clock", f"{told}: too slow a connection to tell")
    return warn("node.clock", told) if abs(visit.skew) - visit.bound > SKEW else ok("node.clock", told)


def _sbatch(report: NodeReport) -> Check:
    answer = report.sbatch
    if isinstance(answer, Unread):
        absent = answer.cause is UnreadCause.NOT_FOUND
        return warn("node.sbatch", "no sbatch on PATH there") if absent else unknown("node.sbatch", answer)
    assert isinstance(answer, Ended)
    told = answer.said[:200]
    return ok("node.sbatch", "sbatch --test-only is answered there") if answer.code == 0 else warn("node.sbatch", told)


def _gpus(report: NodeReport) -> Check:
    nvml, given = report.host.nvml, [one for one in report.slurm_gpus.split(",") if one]
    if isinstance(nvml, Unread):
        return warn("node.gpus", nvml.why) if nvml.cause is UnreadCause.NVML else unknown("node.gpus", nvml)
    if not nvml.driver:
        told = "no NVIDIA driver there"
        return warn("node.gpus", f"{told}, but Slurm gave the job GPU {report.slurm_gpus}") if given else ok(
            "node.gpus", f"{told}, and no GPU was asked for")  # fmt: skip
    told = f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU is visible'}"
    if given and not nvml.gpus:
        return warn("node.gpus", f"{told}, but Slurm gave the job GPU {report.slurm_gpus}")
    seen = f"{told}; Slurm gave {len(given)}" + (
        ", so a job sees GPUs that are not its own" if given and len(nvml.gpus) > len(given) else "")  # fmt: skip
    return ok("node.gpus", seen)
