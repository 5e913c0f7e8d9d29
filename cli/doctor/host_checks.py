"""Judge this machine and the folder of all runs. The functions are pure. Some checks also judge a node."""

from __future__ import annotations

import ipaddress

from ...config.import_paths import ENGINES, EngineRow
from ..views.formatting import size
from .catalogue import fail, limit, ok, unknown, warn
from .facts import Check, Facts, Storage, Visit
from .node_probe.host import Dcgm, Limits, Machine, Network, Nvml, Python, Scratch, Ucx, Unavailable, UnavailableCause

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
_RDMA_TRANSPORTS = ("rc_", "dc_", "ud_", "rc", "dc", "ud", "gga_")
_BUILT_IN_PACKAGES = ("torch", "transformers", "reasoning-gym")


def host_checks(facts: Facts) -> list[Check]:
    """Return the checks of this machine."""
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
        *(_engine(name, row, host.python) for name, row in ENGINES.items() if row.package),
        ucx("host.ucx", host.ucx, host.network, host.python),
        packet_filter("host.filter", host.network, host.python),
        _nvml(host.nvml, cluster),
        _dcgm(host.dcgm),
    ]


def storage_checks(facts: Facts) -> list[Check]:
    """Return the checks of the folder of all runs."""
    storage = facts.storage
    names = ("runs.writable", "runs.kind", "runs.space", "runs.durable")
    if isinstance(storage, Unavailable):
        return [unknown(name, storage) for name in names]
    if storage.trouble:
        text = f"{storage.at}: {storage.trouble}"
        writable = fail("runs.writable", text)
        durable = unknown("runs.durable", f"nothing could be written ({text})")
    else:
        where = storage.root if storage.at == storage.root else f"{storage.root} (missing; {storage.at} exists)"
        writable, durable = ok("runs.writable", where), _durable(storage)
        if storage.doubts:
            writable = warn("runs.writable", storage.doubts[0])
    return [writable, _kind(storage, facts), _space(storage), durable]


# ── the folder of all runs ─────────────────────────────────────────────────────────────────────────────────────────
def _kind(storage: Storage, facts: Facts) -> Check:
    if not storage.kind:
        return unknown("runs.kind", "its file system is not listed in /proc/self/mountinfo")
    if facts.slurm is None:
        return ok("runs.kind", f"{storage.kind}; the local cluster needs no shared file system")
    if isinstance(facts.node, Visit) and not facts.node.report.folder:
        return ok("runs.kind", f"{storage.kind}; {facts.node.report.node} sees it")
    if storage.kind in LOCAL_FILE_SYSTEMS:
        return warn("runs.kind", f"{storage.kind}, which only this machine sees unless it is exported")
    if storage.kind in NETWORK_FILE_SYSTEMS:
        return ok("runs.kind", f"{storage.kind}; rrl needs no flock there")
    return unknown("runs.kind", f"{storage.kind}: rrl does not know whether nodes share it")


def _space(storage: Storage) -> Check:
    inodes = "inodes are not counted there" if storage.inodes < 0 else f"{storage.inodes} inodes"
    text = f"{size(storage.free)} and {inodes} free; a quota is not taken into account"
    if storage.free < MIN_FREE_BYTES or storage.inodes in range(100):
        return fail("runs.space", text)
    return (
        warn("runs.space", text)
        if storage.free < LOW_FREE_BYTES or 0 <= storage.inodes < MIN_FREE_INODES
        else ok("runs.space", text)
    )


def _durable(storage: Storage) -> Check:
    text = f"O_EXCL {'works' if storage.exclusive else 'does not refuse a second creator'}; a write with fsync took"
    text += f" {1000 * storage.fsync:.1f} ms"
    if not storage.exclusive:
        return fail("runs.durable", text)
    return warn("runs.durable", text) if storage.fsync > SLOW_FSYNC_S else ok("runs.durable", text)


# ── this machine or a node ─────────────────────────────────────────────────────────────────────────────────────────
def nofile(name: str, limits: Limits | Unavailable) -> Check:
    """Check the limit of open files."""
    if isinstance(limits, Unavailable):
        return unknown(name, limits)
    text = f"{limit(limits.nofile)} (may be raised to {limit(limits.nofile_hard)})"
    return warn(name, text) if 0 <= limits.nofile < MIN_OPEN_FILES else ok(name, text)


def memlock(
    name: str, limits: Limits | Unavailable, network: Network | Unavailable, ucx_info: Ucx | Unavailable
) -> Check:
    """Check the limit of locked memory, which RDMA needs."""
    if isinstance(limits, Unavailable):
        return unknown(name, limits)
    if limits.memlock < 0:
        return ok(name, "unlimited")
    text = size(limits.memlock)
    if (
        not isinstance(network, Unavailable)
        and not network.rdma
        and not (isinstance(ucx_info, Ucx) and rdma_transports(ucx_info))
    ):
        return ok(name, f"{text}; enough without RDMA cards, and there are none")
    return warn(name, f"{text}; RDMA may need more, since it locks its buffers")


def tmp(name: str, scratch: Scratch | Unavailable) -> Check:
    """Check the node-local folder for temporary files."""
    if isinstance(scratch, Unavailable):
        return unknown(name, scratch)
    text = f"{scratch.tmp} ({scratch.tmp_filesystem}), {size(scratch.tmp_free)} free; /dev/shm {size(scratch.shm_free)}"
    if scratch.trouble:
        return warn(name, f"{scratch.tmp}: {scratch.trouble}")
    if scratch.tmp_filesystem in NETWORK_FILE_SYSTEMS:
        return warn(name, f"{text}: sockets and locks may not work on a network file system")
    if len(scratch.tmp) > MAX_TMPDIR_LENGTH:
        return warn(name, f"{text}: the path is too long for the names of sockets")
    return ok(name, text)


def ucx(name: str, ucx_info: Ucx | Unavailable, network: Network | Unavailable, python: Python | Unavailable) -> Check:
    """Check which transports UCX offers on this host. ``name`` is the name of the check.

    The verdict is WARN if the host has RDMA cards that UCX cannot use, and UNKNOWN if UCX gives no answer. Without RDMA
    cards a missing ucxx is OK, since UCX over TCP is not faster than plain TCP. ``[transport] weights = "auto"``
    selects ucx only if UCX can use RDMA cards of the host, else tcp. The result does not matter for ``"nixl"``: NIXL
    ships its own UCX, with modules for RDMA.
    """
    packages = {} if isinstance(python, Unavailable) else python.packages
    nixl = next((f"{one} {version}" for one, version in packages.items() if one.startswith("nixl")), "")
    beside = f'; {nixl} is installed for [transport] weights = "nixl"' if nixl else ""
    fix = 'write [transport] weights = "nixl"' if nixl else None
    cards = () if isinstance(network, Unavailable) else network.rdma
    if not isinstance(python, Unavailable) and not any(one.startswith("ucxx") for one in packages):
        text = "ucxx is not installed: weights are sent over plain TCP, which is as fast as UCX over TCP"
        return (
            warn(name, f"{text}, but this machine has {', '.join(cards)}{beside}", fix)
            if cards
            else ok(name, text + beside)
        )
    if isinstance(ucx_info, Unavailable):
        return unknown(name, ucx_info)
    if not ucx_info.transports:
        return unknown(name, f"ucx_info of {ucx_info.source} names no transport")
    text = f"UCX {ucx_info.version} ({ucx_info.source}): {', '.join(_transports_text(ucx_info))}"
    if cards and not rdma_transports(ucx_info):
        return warn(name, f"{text}; no transport for {', '.join(cards)}{beside}", fix)
    return ok(name, text + beside)


def packet_filter(name: str, network: Network | Unavailable, python: Python | Unavailable) -> Check:
    """Check that this user may attach a packet filter to sockets. ``name`` is the name of the check.

    NIXL over TCP starts only if a filter can close its ports. NIXL over RDMA has no TCP ports. The verdict is therefore
    FAIL only if the kernel refuses the filter, NIXL is installed and the host has no RDMA cards.
    """
    if isinstance(network, Unavailable):
        return unknown(name, network)
    if not network.filter_refused:
        return ok(name, "this user may attach a packet filter to its sockets")
    text = f"the kernel does not let this user attach a packet filter: {network.filter_refused}"
    packages = {} if isinstance(python, Unavailable) else python.packages
    if network.rdma or not any(one.startswith("nixl") for one in packages):
        return ok(name, f"{text}; no installed package needs one")
    return fail(name, f'{text}; [transport] weights = "nixl" does not start over TCP')


def rdma_transports(ucx_info: Ucx) -> list[str]:
    """Return UCX's transports that use RDMA: ``rc_verbs``, ``rc_mlx5``, ``dc_mlx5`` and so on."""
    return [
        one
        for one in ucx_info.transports
        if one in _RDMA_TRANSPORTS or one.startswith(tuple(x for x in _RDMA_TRANSPORTS if "_" in x))
    ]


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


def _transports_text(ucx_info: Ucx) -> list[str]:
    over = [f"{name} ({'+'.join(devices)})" for name, devices in ucx_info.transports.items() if devices != ("memory",)]
    return over + [name for name, devices in ucx_info.transports.items() if devices == ("memory",)]


# ── this machine ───────────────────────────────────────────────────────────────────────────────────────────────────
def _machine(machine: Machine | Unavailable, cluster: bool) -> Check:
    if isinstance(machine, Unavailable):
        return unknown("host.machine", machine)
    text = f"{machine.cpus} cores, {size(machine.available)} of {size(machine.memory)} available"
    if machine.available < MIN_LOCAL_MEMORY_BYTES and not cluster:
        return warn("host.machine", f"{text}: too little for the local cluster")
    return ok(
        "host.machine", f'{text}; kind = "local" works here' if machine.available >= MIN_LOCAL_MEMORY_BYTES else text
    )


def _python(python: Python | Unavailable, facts: Facts) -> Check:
    if isinstance(python, Unavailable):
        return unknown("host.python", python)
    text = f"{python.executable} ({python.version}), on {python.prefix_filesystem or 'an unknown file system'}"
    if facts.slurm is not None and not isinstance(facts.node, Visit) and python.prefix_filesystem in LOCAL_FILE_SYSTEMS:
        return warn("host.python", f"{text}: nodes have this environment only if it is exported or copied")
    return ok("host.python", text)


def _address(network: Network | Unavailable, cluster: bool) -> Check:
    name = "host.address"
    if isinstance(network, Unavailable):
        return unknown(name, network)
    resolved = f"{network.host} resolves to {network.resolves or 'nothing'}"
    if not cluster:
        return ok(name, f"{resolved}; the local cluster uses 127.0.0.1")
    if network.trouble:
        return warn(name, f"{resolved}: {network.trouble}")
    text = f"{resolved}; rrl uses {network.chosen} of {networks_text(network)}"
    if network.requested:
        return ok(name, f"{text} (RRL_NETWORK={network.requested})")
    if len(candidate_networks(network)) > 1:
        fix = f'[transport] network = "{next(iter(candidate_networks(network)))}", or another one that the nodes share'
        return warn(name, f"{text}: rrl cannot know which of these networks the nodes share", fix)
    return ok(name, text)


def _core(limits: Limits | Unavailable) -> Check:
    if isinstance(limits, Unavailable):
        return unknown("host.core", limits)
    if limits.core == 0:
        return ok("host.core", "no core dumps are written (limit 0)")
    if limits.core_pattern.startswith("|"):
        return ok("host.core", f"core dumps are handed to {limits.core_pattern[1:].split()[0]}")
    return warn(
        "host.core", f"each crash writes a core file of at most {limit(limits.core)} to {limits.core_pattern!r}"
    )


def _torch(python: Python | Unavailable) -> Check:
    if isinstance(python, Unavailable):
        return unknown("host.torch", python)
    present = [f"{one} {python.packages[one]}" for one in _BUILT_IN_PACKAGES if one in python.packages]
    if missing := [one for one in _BUILT_IN_PACKAGES if one not in python.packages]:
        return warn("host.torch", f"not installed: {', '.join(missing)}; only roles with their own command work")
    return ok("host.torch", f"{', '.join(present)} (installed; not imported here)")


def _engine(name: str, row: EngineRow, python: Python | Unavailable) -> Check:
    if isinstance(python, Unavailable):
        return unknown(f"host.{name}", python)
    present = [f"{one} {python.packages[one]}" for one in row.distributions if one in python.packages]
    absent = f'not installed; only engine = "{name}" needs it'
    return ok(f"host.{name}", f"{present[0]} (installed; not imported here)" if present else absent)


def _nvml(nvml: Nvml | Unavailable, cluster: bool) -> Check:
    if isinstance(nvml, Unavailable):
        return warn("host.nvml", nvml.why) if nvml.cause is UnavailableCause.NVML else unknown("host.nvml", nvml)
    if not nvml.driver:
        return ok("host.nvml", f"no NVIDIA driver here{', as on most login nodes' if cluster else ''}")
    return ok("host.nvml", f"driver {nvml.driver}: {', '.join(nvml.gpus) or 'no GPU'}")


def _dcgm(dcgm: Dcgm | Unavailable) -> Check:
    if isinstance(dcgm, Unavailable):
        return unknown("host.dcgm", dcgm)
    exporter = "something listens on port 9400" if dcgm.exporter else "nothing listens on port 9400"
    return ok("host.dcgm", f"{dcgm.dcgmi or 'no dcgmi'}; {exporter}")
