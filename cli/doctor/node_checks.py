"""Judge the report of the job on a compute node, compared with this machine. The functions are pure."""

from __future__ import annotations

from ...core.command_runner import CommandResult
from .catalogue import MEANINGS, fail, ok, unknown, warn
from .facts import Check, Facts, Visit
from .host_checks import candidate_networks, memlock, networks_text, nofile, packet_filter, tmp, ucx
from .node_probe.host import Host, Network, Nvml, Python, Unavailable, UnavailableCause
from .node_probe.main import NodeReport

MAX_CLOCK_SKEW_S = 1.0
"""Difference (s) between two clocks beyond which the order of lines in merged logs is misleading."""
MAX_FILE_DELAY_S = 5.0
"""Time (s) within which a file that a node wrote should become visible here. Commands and status are exchanged by
files, so they have the same delay."""
SLOW_IMPORT_S = 5.0
"""Time (s) above which importing torch on an idle node is slow. On a hundred nodes at once, the import takes longer."""
_SLOW_IMPORT_FIX = "raise [limits] join, or put the environment on a local disk of the node ([env] python)"
NAMES = tuple(name for name in MEANINGS if name.startswith("node."))


def node_checks(facts: Facts) -> list[Check]:
    """Return the checks of a compute node; none without a cluster.

    All checks are UNKNOWN if no job reported from a node, or the user allowed no job.
    """
    visit = facts.node
    if visit is None:
        return []
    if isinstance(visit, Unavailable):
        return [unknown(name, visit, MEANINGS["node.visit"].fix) for name in NAMES]
    report, host = visit.report, visit.report.host
    return [
        ok("node.visit", f"a job on {report.node} reported"),
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
    """Return the networks in which both machines have an address, as {CIDR: interface of ``one``}."""
    if isinstance(one.network, Unavailable) or isinstance(other.network, Unavailable):
        return {}
    return {
        cidr: name
        for cidr, name in candidate_networks(one.network).items()
        if cidr in candidate_networks(other.network)
    }


def _folder(facts: Facts, report: NodeReport) -> Check:
    root = facts.storage.root if not isinstance(facts.storage, Unavailable) else "the folder of all runs"
    if report.folder:
        return fail("node.folder", f"{root} on {report.node}: {report.folder}")
    return ok("node.folder", f"{report.node} can read what was written here in {root}")


def _answer(visit: Visit) -> Check:
    if visit.report.folder:
        return unknown("node.answer", "the node wrote nothing, because it does not see the folder")
    if visit.visible_after_s is None:
        return fail(
            "node.answer", "the file that the node wrote did not become visible here", MEANINGS["node.folder"].fix
        )
    text = f"visible here {visit.visible_after_s:.1f} s after the node was done"
    return warn("node.answer", text) if visit.visible_after_s > MAX_FILE_DELAY_S else ok("node.answer", text)


def _rrl(report: NodeReport, facts: Facts) -> Check:
    login_python, node_python = facts.host.python, report.host.python
    if isinstance(login_python, Unavailable) or isinstance(node_python, Unavailable):
        return unknown("node.rrl", login_python if isinstance(login_python, Unavailable) else node_python)  # type: ignore[arg-type]
    text = f"{node_python.executable} ({node_python.version}) runs rrl from {report.rrl}"
    if login_python.version != node_python.version or login_python.packages.get(
        "rrl-slurm"
    ) != node_python.packages.get("rrl-slurm"):
        return fail(
            "node.rrl",
            f"{text}; here it is Python {login_python.version}, rrl {login_python.packages.get('rrl-slurm', '?')}",
        )
    return ok("node.rrl", text)


def _packages(node_python: Python | Unavailable, login_python: Python | Unavailable) -> Check:
    if isinstance(login_python, Unavailable) or isinstance(node_python, Unavailable):
        return unknown("node.packages", login_python if isinstance(login_python, Unavailable) else node_python)  # type: ignore[arg-type]
    there, here = node_python.packages, login_python.packages
    names = sorted({*here, *there})
    differ = [
        f"{name} {there.get(name, 'absent')} (here {here.get(name, 'absent')})"
        for name in names
        if here.get(name) != there.get(name)
    ]
    return (
        warn("node.packages", "; ".join(differ))
        if differ
        else ok("node.packages", f"the same {len(names)} packages as here")
    )


def _torch(report: NodeReport) -> Check:
    torch, python = report.torch, report.host.python
    if isinstance(torch, Unavailable):
        if not isinstance(python, Unavailable) and "torch" not in python.packages:
            return warn("node.torch", "not installed on the node")
        slow = torch.cause is UnavailableCause.TIMEOUT
        return (
            warn("node.torch", f"importing torch: {torch.why}", _SLOW_IMPORT_FIX)
            if slow
            else unknown("node.torch", torch)
        )
    text = f"{torch.version} imports in {torch.seconds:.1f} s and sees {torch.gpus} GPUs"
    if report.slurm_gpus and not torch.gpus and _has_driver(report):
        return warn("node.torch", f"{text}; Slurm gave the job GPU {report.slurm_gpus}")
    if torch.seconds > SLOW_IMPORT_S:
        return warn("node.torch", text, _SLOW_IMPORT_FIX)
    return ok("node.torch", text)


def _has_driver(report: NodeReport) -> bool:
    return isinstance(report.host.nvml, Nvml) and report.host.nvml.driver != ""


def _address(node_network: Network | Unavailable, login_network: Network | Unavailable) -> Check:
    name = "node.address"
    if isinstance(node_network, Unavailable):
        return unknown(name, node_network)
    if node_network.trouble:
        return fail(name, f"{node_network.host}: {node_network.trouble}")
    text = f"{node_network.host} resolves to {node_network.resolves or 'nothing'} there"
    text += f"; a role listens at {node_network.chosen} of {networks_text(node_network)}"
    if len(candidate_networks(node_network)) > 1 and not node_network.requested:
        both = (
            []
            if isinstance(login_network, Unavailable)
            else [one for one in candidate_networks(node_network) if one in candidate_networks(login_network)]
        )
        shared = f"; this machine is also on {', '.join(both)}" if both else ""
        return warn(name, f"{text}{shared}", f'[transport] network = "{both[0]}"' if both else None)
    return ok(name, text)


def _reach(report: NodeReport) -> Check:
    if not report.reached:
        return unknown("node.reach", "rrl found no address of this machine for the node to connect to")
    reachable = [one.address.rpartition(":")[0] for one in report.reached if not one.trouble]
    refused = ", ".join(f"{one.address.rpartition(':')[0]}: {one.trouble}" for one in report.reached if one.trouble)
    if not reachable:
        return warn("node.reach", refused)
    return ok("node.reach", f"at {', '.join(reachable)}{f' (not at {refused})' if refused else ''}")


def _clock(visit: Visit) -> Check:
    if visit.skew is None:
        return unknown("node.clock", "the node did not connect to this machine, so the clocks could not be compared")
    text = f"{abs(visit.skew):.3f} s {'ahead' if visit.skew > 0 else 'behind'} (± {visit.bound:.3f} s)"
    if visit.bound > MAX_CLOCK_SKEW_S:
        return unknown("node.clock", f"{text}: the connection was too slow for a more exact value")
    return warn("node.clock", text) if abs(visit.skew) - visit.bound > MAX_CLOCK_SKEW_S else ok("node.clock", text)


def _sbatch(report: NodeReport) -> Check:
    answer = report.sbatch
    if isinstance(answer, Unavailable):
        absent = answer.cause is UnavailableCause.NOT_FOUND
        return warn("node.sbatch", "no sbatch on PATH there") if absent else unknown("node.sbatch", answer)
    assert isinstance(answer, CommandResult)
    text = answer.message[:200]
    return ok("node.sbatch", "sbatch --test-only works there") if answer.code == 0 else warn("node.sbatch", text)


def _gpus(report: NodeReport) -> Check:
    nvml, given = report.host.nvml, [one for one in report.slurm_gpus.split(",") if one]
    if isinstance(nvml, Unavailable):
        return warn("node.gpus", nvml.why) if nvml.cause is UnavailableCause.NVML else unknown("node.gpus", nvml)
    if not nvml.driver:
        text = "no NVIDIA driver there"
        return (
            warn("node.gpus", f"{text}, but Slurm gave the job GPU {report.slurm_gpus}")
            if given
            else ok("node.gpus", f"{text}, and the job requested no GPU")
        )
    text = f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU is visible'}"
    if given and not nvml.gpus:
        return warn("node.gpus", f"{text}, but Slurm gave the job GPU {report.slurm_gpus}")
    summary = f"{text}; Slurm gave {len(given)}" + (
        ", so a job sees GPUs that it was not given" if given and len(nvml.gpus) > len(given) else ""
    )
    return ok("node.gpus", summary)
