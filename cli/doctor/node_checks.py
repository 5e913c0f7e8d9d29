"""Judge the report of the job on a compute node, compared with this machine. The functions are pure."""

from __future__ import annotations

from functools import partial

from ...core.command_runner import CommandResult
from .catalogue import MEANINGS, Answer, check, fail, ok, unknown, warn
from .facts import Check, Facts, Storage, Visit
from .host_checks import candidate_networks, machine_checks, networks_text
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
        return [check(name, partial(unknown, visit, MEANINGS["node.visit"].fix)) for name in NAMES]
    report, host, here = visit.report, visit.report.host, facts.host
    return [
        check("node.visit", ok, f"a job on {report.node} reported"),
        check("node.folder", partial(_folder, report, facts.storage)),
        check("node.answer", _answer, visit),
        check("node.rrl", partial(_rrl, report), here.python, host.python),
        check("node.packages", _packages, here.python, host.python),
        check("node.torch", _torch, report),
        check("node.address", partial(_address, here, host), host.network),
        check("node.reach", _reach, report),
        check("node.clock", _clock, report),
        check("node.sbatch", partial(_sbatch, report.sbatch)),
        *machine_checks("node", host),
        check("node.gpus", _gpus, report),
    ]


def common_networks(one: Host, other: Host) -> dict[str, str]:
    """Return the networks in which both machines have an address, as {CIDR: interface of ``one``}."""
    if isinstance(one.network, Unavailable) or isinstance(other.network, Unavailable):
        return {}
    others = candidate_networks(other.network)
    return {cidr: name for cidr, name in candidate_networks(one.network).items() if cidr in others}


def _folder(report: NodeReport, storage: Storage | Unavailable) -> Answer:
    root = "the folder of all runs" if isinstance(storage, Unavailable) else storage.root
    if report.folder:
        return fail(f"{root} on {report.node}: {report.folder}")
    return ok(f"{report.node} can read what was written here in {root}")


def _answer(visit: Visit) -> Answer:
    if visit.report.folder:
        return unknown("the node wrote nothing, because it does not see the folder")
    if visit.visible_after_s is None:
        return fail("the file that the node wrote did not become visible here", MEANINGS["node.folder"].fix)
    text = f"visible here {visit.visible_after_s:.1f} s after the node was done"
    return warn(text) if visit.visible_after_s > MAX_FILE_DELAY_S else ok(text)


def _rrl(report: NodeReport, here: Python, there: Python) -> Answer:
    text = f"{there.executable} ({there.version}) runs rrl from {report.rrl}"
    own = here.packages.get("rrl-slurm")
    if (here.version, own) != (there.version, there.packages.get("rrl-slurm")):
        return fail(f"{text}; here it is Python {here.version}, rrl {own or '?'}")
    return ok(text)


def _packages(here: Python, there: Python) -> Answer:
    versions = {
        name: (there.packages.get(name, "absent"), here.packages.get(name, "absent"))
        for name in sorted({*here.packages, *there.packages})
    }
    differ = [f"{name} {one} (here {other})" for name, (one, other) in versions.items() if one != other]
    return warn("; ".join(differ)) if differ else ok(f"the same {len(versions)} packages as here")


def _torch(report: NodeReport) -> Answer:
    torch, python = report.torch, report.host.python
    if isinstance(torch, Unavailable):
        if isinstance(python, Python) and "torch" not in python.packages:
            return warn("not installed on the node")
        if torch.cause is UnavailableCause.TIMEOUT:
            return warn(f"importing torch: {torch.why}", _SLOW_IMPORT_FIX)
        return unknown(torch)
    text = f"{torch.version} imports in {torch.seconds:.1f} s and sees {torch.gpus} GPUs"
    has_driver = isinstance(report.host.nvml, Nvml) and report.host.nvml.driver != ""
    if report.slurm_gpus and not torch.gpus and has_driver:
        return warn(f"{text}; Slurm gave the job GPU {report.slurm_gpus}")
    return warn(text, _SLOW_IMPORT_FIX) if torch.seconds > SLOW_IMPORT_S else ok(text)


def _address(here: Host, there: Host, network: Network) -> Answer:
    if network.trouble:
        return fail(f"{network.host}: {network.trouble}")
    text = f"{network.host} resolves to {network.resolves or 'nothing'} there"
    text += f"; a role listens at {network.chosen} of {networks_text(network)}"
    if len(candidate_networks(network)) > 1 and not network.requested:
        both = list(common_networks(there, here))
        shared = f"; this machine is also on {', '.join(both)}" if both else ""
        return warn(f"{text}{shared}", f'[transport] network = "{both[0]}"' if both else None)
    return ok(text)


def _reach(report: NodeReport) -> Answer:
    if not report.reached:
        return unknown("rrl found no address of this machine for the node to connect to")
    reachable = [one.address.rpartition(":")[0] for one in report.reached if not one.trouble]
    refused = ", ".join(f"{one.address.rpartition(':')[0]}: {one.trouble}" for one in report.reached if one.trouble)
    if not reachable:
        return warn(refused)
    return ok(f"at {', '.join(reachable)}{f' (not at {refused})' if refused else ''}")


def _clock(report: NodeReport) -> Answer:
    best = min((one for one in report.reached if not one.trouble), key=lambda one: one.bound, default=None)
    if best is None:
        return unknown("the node did not connect to this machine, so the clocks could not be compared")
    text = f"{abs(best.skew):.3f} s {'ahead' if best.skew > 0 else 'behind'} (± {best.bound:.3f} s)"
    if best.bound > MAX_CLOCK_SKEW_S:
        return unknown(f"{text}: the connection was too slow for a more exact value")
    return warn(text) if abs(best.skew) - best.bound > MAX_CLOCK_SKEW_S else ok(text)


def _sbatch(answer: CommandResult | Unavailable) -> Answer:
    if isinstance(answer, Unavailable):
        absent = answer.cause is UnavailableCause.NOT_FOUND
        return warn("no sbatch on PATH there") if absent else unknown(answer)
    return ok("sbatch --test-only works there") if answer.code == 0 else warn(answer.message[:200])


def _gpus(report: NodeReport) -> Answer:
    nvml, given = report.host.nvml, [one for one in report.slurm_gpus.split(",") if one]
    if isinstance(nvml, Unavailable):
        return warn(nvml.why) if nvml.cause is UnavailableCause.NVML else unknown(nvml)
    if not nvml.driver:
        text = "no NVIDIA driver there"
        if given:
            return warn(f"{text}, but Slurm gave the job GPU {report.slurm_gpus}")
        return ok(f"{text}, and the job requested no GPU")
    text = f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU is visible'}"
    if given and not nvml.gpus:
        return warn(f"{text}, but Slurm gave the job GPU {report.slurm_gpus}")
    unasked = ", so a job sees GPUs that it was not given" if given and len(nvml.gpus) > len(given) else ""
    return ok(f"{text}; Slurm gave {len(given)}{unasked}")
