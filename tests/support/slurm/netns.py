"""Gives each node a network of its own: a namespace, a link and an address, joined by a bridge (root only).

The controller and the submitting user stay in the machine's own namespace, where the bridge has an address in the
same network. All processes share one pid namespace.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

_NETWORKS = tuple(f"198.{second}.{third}" for second in (18, 19) for third in range(256))
"""Networks in 198.18.0.0/15. No site routes this range, because it is reserved for tests of network devices (RFC
2544)."""
_BRIDGE_HOST = 254


class Network(Struct, frozen=True):
    """The network of a lab.

    The names of its devices (at most 15 characters) begin with ``prefix``, its addresses with ``first``.
    """

    prefix: str
    first: str
    """The first three octets of the network's addresses."""

    @property
    def cidr(self) -> str:
        return f"{self.first}.0/24"

    @property
    def controller(self) -> str:
        return f"{self.first}.{_BRIDGE_HOST}"

    @property
    def bridge(self) -> str:
        return f"{self.prefix}br"

    def namespace(self, node: str) -> str:
        return f"{self.prefix}{node}"

    def link(self, node: str) -> str:
        """Return the name of this machine's end of the node's link."""
        return f"{self.prefix}v{node}"

    def address(self, node: str) -> str:
        return f"{self.first}.{node.removeprefix('n')}"


def possible() -> bool:
    """Return whether this process can create namespaces and links.

    This needs root, iproute2, and a kernel that permits it; in containers it is often denied.
    """
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("ip", "nsenter", "unshare")):
        return False
    name = f"rrl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


def free_network(prefix: str) -> Network:
    """Return a network in which no device of this machine has an address.

    The choice is random, so that labs that start at the same time get different networks.
    """
    taken = _ip("-o", "-4", "addr", "show")
    return Network(prefix, random.choice([first for first in _NETWORKS if f" {first}." not in taken]))


def make(network: Network, nodes: tuple[str, ...]) -> None:
    """Create the bridge, and for each node a namespace with a link to the bridge. Raises CalledProcessError."""
    _ip("link", "add", network.bridge, "type", "bridge")
    _ip("addr", "add", f"{network.controller}/24", "dev", network.bridge)
    _ip("link", "set", network.bridge, "up")
    for node in nodes:
        namespace, link = network.namespace(node), network.link(node)
        _ip("netns", "add", namespace)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", network.bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{network.address(node)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")


def remove(network: Network) -> None:
    """Remove all devices and namespaces that :func:`make` and :func:`divert` have created and that still exist."""
    for path in Path("/run/netns").glob(f"{network.prefix}n*"):
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True)
    for path in Path("/sys/class/net").glob(f"{network.prefix}*"):
        subprocess.run(["ip", "link", "del", path.name], capture_output=True)


def left(network: Network) -> list[str]:
    """Return the names of the network's namespaces and devices on this machine."""
    paths = *Path("/run/netns").glob(f"{network.prefix}n*"), *Path("/sys/class/net").glob(f"{network.prefix}*")
    return sorted(path.name for path in paths)


def inside(network: Network, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that runs ``argv`` with the node's network and host name.

    ``ip netns exec`` is not used, because it hides /sys/fs/cgroup from slurmd.
    """
    rename = ("sh", "-c", 'hostname "$0" && exec "$@"', node)
    return ("nsenter", f"--net=/run/netns/{network.namespace(node)}", "unshare", "--uts", *rename, *argv)


def cut(network: Network, node: str) -> None:
    """Drop every packet of the node from now on; connections remain open."""
    _ip("link", "set", network.link(node), "down")


def heal(network: Network, node: str) -> None:
    _ip("link", "set", network.link(node), "up")


def shape(network: Network, node: str, rate: str) -> None:
    """Give the node a NIC of ``rate`` in each direction (in tc's notation: ``2gbit``).

    Raises RuntimeError if the kernel has no token bucket filter.
    """
    limit = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
    _run("tc", "-n", network.namespace(node), "qdisc", "replace", "dev", "eth0", *limit)
    _run("tc", "qdisc", "replace", "dev", network.link(node), *limit)


def passed(network: Network, node: str) -> tuple[int, int]:
    """Return the bytes that the node's NIC has sent and received so far."""
    counters = Path(f"/sys/class/net/{network.link(node)}/statistics")
    return int((counters / "rx_bytes").read_text()), int((counters / "tx_bytes").read_text())


def divert(network: Network, node: str) -> tuple[str, str]:
    """Take the node's link off the bridge.

    Returns the link and a device on the bridge, between which its frames can be forwarded.
    """
    link, near, far = network.link(node), f"{network.prefix}d{node}", f"{network.prefix}e{node}"
    _ip("link", "add", near, "type", "veth", "peer", "name", far)
    for device in (link, near):  # no ARP replies for the bridge's address on these devices
        Path(f"/proc/sys/net/ipv4/conf/{device}/arp_ignore").write_text("1")
    _ip("link", "set", link, "nomaster")
    _ip("link", "set", far, "master", network.bridge, "up")
    _ip("link", "set", near, "up")
    return link, near


def undivert(network: Network, node: str) -> None:
    """Put the node's link back on the bridge."""
    _ip("link", "del", f"{network.prefix}d{node}")
    _ip("link", "set", network.link(node), "master", network.bridge)


def _ip(*argv: str) -> str:
    return _run("ip", *argv)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
