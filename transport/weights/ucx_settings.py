"""What UCX is told before it starts: transports, devices and tuning, for ucxx and for the UCX inside NIXL.

Over TCP UCX emulates put and get for whoever connects to its ports, without a key: whoever reaches them reads and
writes the memory of the process (docs/sites.md, "Weights over UCX"). So its TCP transport is switched off, unless the
job calls its network trusted; then it may use one network interface and the RDMA ports, no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ..address import Interface

SETTINGS = {
    "UCX_TCP_RX_SEG_SIZE": "512K",  # defaults of 64K and 8K cost a factor of 3.5 to 4
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_KEEPIDLE": "5s",  # measured with 1 s: a cut link is noticed in 3.6 s, by default in 28; so 5 + 3 s here
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_POSIX_ERROR_HANDLING": "y",  # else shared memory is silently left out
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",  # it warns, on stdout, of every stranger that hangs up: a flood in the role's log
}
"""Set before UCX is loaded, unless the environment says otherwise."""
TLS, NET_DEVICES = "UCX_TLS", "UCX_NET_DEVICES"
_EVERYTHING = ("all", "*")
"""entries of UCX_TLS that include TCP without naming it"""
_ACTIVE = "4:"
"""``/sys/class/infiniband/<device>/ports/<port>/state`` begins with IBA's number of the state: ``4: ACTIVE``"""
_INFINIBAND = Path("/sys/class/infiniband")
_RESOURCE = re.compile(r"resource\s+\d+\s.*--\s+(\S+)/(\S+)")
"""a line of ucp_context_print_info: ``resource 1  :  md 1  dev 1  flags -- tcp/lo``"""


class Resource(Struct, frozen=True):
    """What a started UCX can use: a transport (``tcp``, ``rc_mlx5``) on a device (``lo``, ``mlx5_0:1``, ``memory``)."""

    transport: str
    device: str


def active_rdma_ports(infiniband: Path = _INFINIBAND) -> tuple[str, ...]:
    """Return the active ports of this node's RDMA devices, RoCE included, as UCX names them (``mlx5_0:1``)."""
    ports = []
    for state in sorted(infiniband.glob("*/ports/*/state")):
        try:
            active = state.read_text().startswith(_ACTIVE)
        except OSError:
            continue
        if active:
            ports.append(f"{state.parts[-4]}:{state.parts[-2]}")
    return tuple(ports)


def without_tcp(transports: str) -> str:
    """Return ``UCX_TLS`` with the same meaning, but without TCP. An empty ``transports`` stands for UCX's default: all.

    Raises ValueError where nothing would be left.
    """
    entries = [entry.strip() for entry in transports.split(",") if entry.strip()]
    if entries and entries[0].startswith("^"):
        return ",".join([*entries, "tcp"])
    if not entries or any(entry in _EVERYTHING for entry in entries):
        return "^tcp"
    remaining = [entry for entry in entries if "tcp" not in entry.lower()]
    if not remaining:
        raise ValueError(f"{TLS}={transports} names nothing but TCP")
    return ",".join(remaining)


def ucx_limits(
    environment: Mapping[str, str], rdma_ports: Sequence[str], interfaces: Iterable[Interface], trusted_host: str | None
) -> dict[str, str]:
    """``UCX_TLS`` and ``UCX_NET_DEVICES`` that keep UCX to what it may use, whatever ``environment`` says.

    ``trusted_host``: the address at which its TCP transport may listen; None: it is switched off.
    Raises ValueError where nothing is left, or no interface has that address.
    """
    if trusted_host is None:
        return {TLS: without_tcp(environment.get(TLS, ""))}
    interfaces = tuple(interfaces)
    own = next((one.name for one in interfaces if one.address == trusted_host), None)
    if own is None:
        raise ValueError(f"no interface has the address {trusted_host}")
    requested = [name.strip() for name in environment.get(NET_DEVICES, "all").split(",")]
    names = {one.name for one in interfaces}
    rdma = list(rdma_ports) if "all" in requested else [name for name in requested if name and name not in names]
    return {NET_DEVICES: ",".join([*rdma, own])}


def resources(context_info: str) -> tuple[Resource, ...]:
    """Parse the text of ``ucp_context_print_info``."""
    return tuple(Resource(*found) for found in _RESOURCE.findall(context_info))


def rdma_resources(available: Iterable[Resource], rdma_ports: Sequence[str]) -> tuple[Resource, ...]:
    """Return the resources that use one of these ports."""
    return tuple(one for one in available if one.device in rdma_ports)


def set_defaults() -> None:
    """Put SETTINGS into this process's environment, where it has no value of its own."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
