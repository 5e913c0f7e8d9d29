"""Judge this machine and the folder of all runs. The functions are pure. Some checks also judge a node."""

from __future__ import annotations

import ipaddress
from functools import partial

from ...config.import_paths import ENGINES, EngineRow
from ..views.formatting import size
from .catalogue import Answer, check, fail, limit, ok, unknown, warn
from .facts import Check, Facts, Storage, Visit
from .node_probe.host import (
    Dcgm,
    Host,
    Limits,
    Machine,
    Network,
    Nvml,
    Python,
    Scratch,
    Ucx,
    Unavailable,
    UnavailableCause,
)

MIN_LOCAL_MEMORY_BYTES = 4 * 2**30
"""Minimum memory in bytes for a local run of the quickstart (four virtual nodes; each torch process takes about 0.4
GiB)."""
MIN_OPEN_FILES = 4096
"""Minimum limit on open files. The manager and the store have some sockets open for each replica, and UCX has some for
each connection."""
MAX_TMPDIR_LENGTH = 60
"""Maximum number of characters of TMPDIR. It is limited, because the path of a Unix socket in this folder may have at
most 107 characters (unix(7))."""
LOW_FREE_BYTES, MIN_FREE_BYTES = 10 * 2**30, 64 * 2**20
"""Numbers of free bytes in the folder of all runs: below the first the check warns, below the second it fails.

Checkpoints of a small model take some MiB, checkpoints of a large model many GiB.
"""
MIN_FREE_INODES = 10_000
"""Free inodes in the folder of all runs below which its check warns.

A run of a thousand incarnations creates about this number of small files.
"""
SLOW_FSYNC_S = 0.5
"""Time (s) above which a small write with fsync is slow. Every external action of a manager waits for such a write."""
LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")
"""Types of file systems that only one machine can access, unless it exports them."""
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.ceph",
    "panfs",
    "wekafs",
    "cifs",
    "9p",
    "virtiofs",
)
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "gga")
_BUILT_IN_PACKAGES = ("torch", "transformers", "reasoning-gym")


def host_checks(facts: Facts) -> list[Check]:
    """Return the checks of this machine."""
    host, cluster = facts.host, facts.slurm is not None
    engines = {name: row for name, row in ENGINES.items() if row.package}
    return [
        check("host.machine", partial(_machine, cluster), host.machine),
        check("host.python", partial(_python, facts), host.python),
        check("host.address", partial(_address, cluster), host.network),
        check("host.core", _core, host.limits),
        *machine_checks("host", host),
        check("host.torch", _torch, host.python),
        *(check(f"host.{name}", partial(_engine, name, row), host.python) for name, row in engines.items()),
        check("host.nvml", partial(_nvml, cluster, host.nvml)),
        check("host.dcgm", _dcgm, host.dcgm),
    ]


def machine_checks(group: str, host: Host) -> list[Check]:
    """Return the checks that this machine and a node have in common; ``group`` is the first part of their names."""
    return [
        check(f"{group}.nofile", _nofile, host.limits),
        check(f"{group}.memlock", partial(_memlock, host), host.limits),
        check(f"{group}.tmp", _tmp, host.scratch),
        check(f"{group}.ucx", partial(_ucx, host)),
        check(f"{group}.filter", partial(_packet_filter, host), host.network),
    ]


def storage_checks(facts: Facts) -> list[Check]:
    """Return the checks of the folder of all runs."""
    storage = facts.storage
    return [
        check("runs.writable", _writable, storage),
        check("runs.kind", partial(_kind, facts), storage),
        check("runs.space", _space, storage),
        check("runs.durable", _durable, storage),
    ]


# ── the folder of all runs ─────────────────────────────────────────────────────────────────────────────────────────
def _writable(storage: Storage) -> Answer:
    if storage.trouble:
        return fail(f"{storage.at}: {storage.trouble}")
    if storage.doubts:
        return warn(storage.doubts[0])
    return ok(storage.root if storage.at == storage.root else f"{storage.root} (missing; {storage.at} exists)")


def _kind(facts: Facts, storage: Storage) -> Answer:
    if not storage.kind:
        return unknown("its file system is not listed in /proc/self/mountinfo")
    if facts.slurm is None:
        return ok(f"{storage.kind}; the local cluster needs no shared file system")
    if isinstance(facts.node, Visit) and not facts.node.report.folder:
        return ok(f"{storage.kind}; {facts.node.report.node} sees it")
    if storage.kind in LOCAL_FILE_SYSTEMS:
        return warn(f"{storage.kind}, which only this machine sees unless it is exported")
    if storage.kind in NETWORK_FILE_SYSTEMS:
        return ok(f"{storage.kind}; rrl needs no flock there")
    return unknown(f"{storage.kind}: rrl does not know whether nodes share it")


def _space(storage: Storage) -> Answer:
    inodes = "inodes are not counted there" if storage.inodes < 0 else f"{storage.inodes} inodes"
    text = f"{size(storage.free)} and {inodes} free; a quota is not taken into account"
    if storage.free < MIN_FREE_BYTES or storage.inodes in range(100):
        return fail(text)
    return warn(text) if storage.free < LOW_FREE_BYTES or 0 <= storage.inodes < MIN_FREE_INODES else ok(text)


def _durable(storage: Storage) -> Answer:
    if storage.trouble:
        return unknown(f"nothing could be written ({storage.at}: {storage.trouble})")
    text = f"O_EXCL {'works' if storage.exclusive else 'does not refuse a second creator'}; a write with fsync took"
    text += f" {1000 * storage.fsync:.1f} ms"
    if not storage.exclusive:
        return fail(text)
    return warn(text) if storage.fsync > SLOW_FSYNC_S else ok(text)


# ── this machine or a node ─────────────────────────────────────────────────────────────────────────────────────────
def _nofile(limits: Limits) -> Answer:
    text = f"{limit(limits.nofile)} (may be raised to {limit(limits.nofile_hard)})"
    return warn(text) if 0 <= limits.nofile < MIN_OPEN_FILES else ok(text)


def _memlock(host: Host, limits: Limits) -> Answer:
    network, ucx = host.network, host.ucx
    if limits.memlock < 0:
        return ok("unlimited")
    text = size(limits.memlock)
    if isinstance(network, Network) and not network.rdma and not (isinstance(ucx, Ucx) and rdma_transports(ucx)):
        return ok(f"{text}; enough without RDMA cards, and there are none")
    return warn(f"{text}; RDMA may need more, since it locks its buffers")


def _tmp(scratch: Scratch) -> Answer:
    text = f"{scratch.tmp} ({scratch.tmp_filesystem}), {size(scratch.tmp_free)} free; /dev/shm {size(scratch.shm_free)}"
    if scratch.trouble:
        return warn(f"{scratch.tmp}: {scratch.trouble}")
    if scratch.tmp_filesystem in NETWORK_FILE_SYSTEMS:
        return warn(f"{text}: sockets and locks may not work on a network file system")
    if len(scratch.tmp) > MAX_TMPDIR_LENGTH:
        return warn(f"{text}: the path is too long for the names of sockets")
    return ok(text)


def _ucx(host: Host) -> Answer:
    """Check which transports UCX offers on this host.

    The verdict is WARN if the host has RDMA cards that UCX cannot use, and UNKNOWN if UCX gives no answer. Without RDMA
    cards a missing ucxx is OK, since UCX over TCP is not faster than plain TCP. ``[transport] weights = "auto"``
    selects ucx only if UCX can use RDMA cards of the host, else tcp. The result does not matter for ``"nixl"``: NIXL
    ships its own UCX, with modules for RDMA.
    """
    ucx, packages = host.ucx, host.packages
    nixl = next((f"{one} {version}" for one, version in packages.items() if one.startswith("nixl")), "")
    beside = f'; {nixl} is installed for [transport] weights = "nixl"' if nixl else ""
    fix = 'write [transport] weights = "nixl"' if nixl else None
    cards = () if isinstance(host.network, Unavailable) else host.network.rdma
    if isinstance(host.python, Python) and not any(one.startswith("ucxx") for one in packages):
        text = "ucxx is not installed: weights are sent over plain TCP, which is as fast as UCX over TCP"
        return warn(f"{text}, but this machine has {', '.join(cards)}{beside}", fix) if cards else ok(text + beside)
    if isinstance(ucx, Unavailable):
        return unknown(ucx)
    if not ucx.transports:
        return unknown(f"ucx_info of {ucx.source} names no transport")
    text = f"UCX {ucx.version} ({ucx.source}): {', '.join(_transports_text(ucx))}"
    if cards and not rdma_transports(ucx):
        return warn(f"{text}; no transport for {', '.join(cards)}{beside}", fix)
    return ok(text + beside)


def _packet_filter(host: Host, network: Network) -> Answer:
    """Check that this user may attach a packet filter to sockets.

    NIXL over TCP starts only if a filter can close its ports. NIXL over RDMA has no TCP ports. The verdict is therefore
    FAIL only if the kernel refuses the filter, NIXL is installed and the host has no RDMA cards.
    """
    if not network.filter_refused:
        return ok("this user may attach a packet filter to its sockets")
    text = f"the kernel does not let this user attach a packet filter: {network.filter_refused}"
    if network.rdma or not any(one.startswith("nixl") for one in host.packages):
        return ok(f"{text}; no installed package needs one")
    return fail(f'{text}; [transport] weights = "nixl" does not start over TCP')


def rdma_transports(ucx: Ucx) -> list[str]:
    """Return UCX's transports that use RDMA: ``rc_verbs``, ``rc_mlx5``, ``dc_mlx5`` and so on."""
    return [one for one in ucx.transports if one.partition("_")[0] in _RDMA_TRANSPORTS]


def candidate_networks(network: Network) -> dict[str, str]:
    """Return the networks on which other machines may be, as {CIDR: interface}.

    Loopback, unconfigured links (169.254/16) and bridges of containers are left out.
    """
    bridges = ("docker", "virbr", "veth", "cni", "podman", "lxc", "br-")
    return {
        one.network: one.name
        for one in network.interfaces
        if not ipaddress.ip_address(one.address).is_loopback
        and not ipaddress.ip_address(one.address).is_link_local
        and not one.name.startswith(bridges)
    }


def networks_text(network: Network) -> str:
    """Return the candidate networks as text."""
    return ", ".join(f"{name} {cidr}" for cidr, name in candidate_networks(network).items()) or "none but loopback"


def _transports_text(ucx: Ucx) -> list[str]:
    over = [f"{name} ({'+'.join(devices)})" for name, devices in ucx.transports.items() if devices != ("memory",)]
    return over + [name for name, devices in ucx.transports.items() if devices == ("memory",)]


# ── this machine ───────────────────────────────────────────────────────────────────────────────────────────────────
def _machine(cluster: bool, machine: Machine) -> Answer:
    text = f"{machine.cpus} cores, {size(machine.available)} of {size(machine.memory)} available"
    if machine.available < MIN_LOCAL_MEMORY_BYTES and not cluster:
        return warn(f"{text}: too little for the local cluster")
    return ok(f'{text}; kind = "local" works here' if machine.available >= MIN_LOCAL_MEMORY_BYTES else text)


def _python(facts: Facts, python: Python) -> Answer:
    text = f"{python.executable} ({python.version}), on {python.prefix_filesystem or 'an unknown file system'}"
    if facts.slurm is not None and not isinstance(facts.node, Visit) and python.prefix_filesystem in LOCAL_FILE_SYSTEMS:
        return warn(f"{text}: nodes have this environment only if it is exported or copied")
    return ok(text)


def _address(cluster: bool, network: Network) -> Answer:
    resolved = f"{network.host} resolves to {network.resolves or 'nothing'}"
    if not cluster:
        return ok(f"{resolved}; the local cluster uses 127.0.0.1")
    if network.trouble:
        return warn(f"{resolved}: {network.trouble}")
    text = f"{resolved}; rrl uses {network.chosen} of {networks_text(network)}"
    if network.requested:
        return ok(f"{text} (RRL_NETWORK={network.requested})")
    if len(candidate_networks(network)) > 1:
        fix = f'[transport] network = "{next(iter(candidate_networks(network)))}", or another one that the nodes share'
        return warn(f"{text}: rrl cannot know which of these networks the nodes share", fix)
    return ok(text)


def _core(limits: Limits) -> Answer:
    if limits.core == 0:
        return ok("no core dumps are written (limit 0)")
    if limits.core_pattern.startswith("|"):
        return ok(f"core dumps are handed to {limits.core_pattern[1:].split()[0]}")
    return warn(f"each crash writes a core file of at most {limit(limits.core)} to {limits.core_pattern!r}")


def _torch(python: Python) -> Answer:
    present = [f"{one} {python.packages[one]}" for one in _BUILT_IN_PACKAGES if one in python.packages]
    if missing := [one for one in _BUILT_IN_PACKAGES if one not in python.packages]:
        return warn(f"not installed: {', '.join(missing)}; only roles with their own command work")
    return ok(f"{', '.join(present)} (installed; not imported here)")


def _engine(name: str, row: EngineRow, python: Python) -> Answer:
    present = [f"{one} {python.packages[one]}" for one in row.distributions if one in python.packages]
    absent = f'not installed; only engine = "{name}" needs it'
    return ok(f"{present[0]} (installed; not imported here)" if present else absent)


def _nvml(cluster: bool, nvml: Nvml | Unavailable) -> Answer:
    if isinstance(nvml, Unavailable):
        return warn(nvml.why) if nvml.cause is UnavailableCause.NVML else unknown(nvml)
    if not nvml.driver:
        return ok(f"no NVIDIA driver here{', as on most login nodes' if cluster else ''}")
    return ok(f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU'}")


def _dcgm(dcgm: Dcgm) -> Answer:
    exporter = "something listens on port 9400" if dcgm.exporter else "nothing listens on port 9400"
    return ok(f"{dcgm.dcgmi or 'no dcgmi'}; {exporter}")
