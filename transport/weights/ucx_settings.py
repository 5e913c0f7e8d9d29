"""The settings of UCX before it starts: transports, devices and tuning, for ucxx and for the UCX inside NIXL.

Over TCP UCX emulates put and get, without a key, for any peer that connects to its ports. So any process that reaches
these ports can read and write the memory of this process (docs/sites.md, "Weights over UCX"). UCX's TCP transport is
therefore disabled unless the job declares its network as trusted. In this case UCX may use one network interface and
the RDMA ports, but no other device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ..address import Interface

SETTINGS = {
    "UCX_TCP_RX_SEG_SIZE": "512K",  # with the defaults (64K, 8K), transfers are 3.5 to 4 times slower
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_KEEPIDLE": "5s",  # a cut link is noticed in 5 + 3 s (measured: 3.6 s if this is 1s, 28 s by default)
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_POSIX_ERROR_HANDLING": "y",  # otherwise UCX disables shared memory without a message
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",  # a warning about every stranger that disconnects would flood the role's log (stdout)
}
"""Environment variables that are set before UCX is loaded, unless they are already set."""
TLS, NET_DEVICES = "UCX_TLS", "UCX_NET_DEVICES"
_EVERYTHING = ("all", "*")
"""Entries of UCX_TLS that include TCP without naming it."""
_ACTIVE = "4:"
"""Beginning of the file ``/sys/class/infiniband/<device>/ports/<port>/state`` of an active port (the state's number in
the InfiniBand specification)."""
_INFINIBAND = Path("/sys/class/infiniband")
_RESOURCE = re.compile(r"resource\s+\d+\s.*--\s+(\S+)/(\S+)")
"""Pattern of a line of ucp_context_print_info, for example ``resource 1 : md 1 dev 1 flags -- tcp/lo``."""


class Resource(Struct, frozen=True):
    """A transport (``tcp``, ``rc_mlx5``) on a device (``lo``, ``mlx5_0:1``, ``memory``) that a started UCX can use."""

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
    """Return a value of ``UCX_TLS`` with the same transports except TCP.

    Args:
        transports: The value. If it is empty, UCX's default applies, which is all transports.

    Raises:
        ValueError: No transport would be left.
    """
    entries = [entry.strip() for entry in transports.split(",") if entry.strip()]
    if entries and entries[0].startswith("^"):
        return ",".join([*entries, "tcp"])
    if not entries or any(entry in _EVERYTHING for entry in entries):
        return "^tcp"
    remaining = [entry for entry in entries if "tcp" not in entry.lower()]
    if not remaining:
        raise ValueError(
            f"{TLS}={transports} allows only TCP, which is excluded here; unset {TLS}, or add a transport for RDMA"
        )
    return ",".join(remaining)


def ucx_limits(
    environment: Mapping[str, str], rdma_ports: Sequence[str], interfaces: Iterable[Interface], trusted_host: str | None
) -> dict[str, str]:
    """Return ``UCX_TLS`` and ``UCX_NET_DEVICES`` that restrict UCX to what it may use.

    Args:
        environment: Environment of the process. Its values of these variables are narrowed, not replaced.
        rdma_ports: Active RDMA ports of this machine.
        interfaces: Interfaces of this machine.
        trusted_host: Address at which UCX's TCP transport may listen, or None if the transport is disabled.

    Raises:
        ValueError: No transport would be left, or no interface has the address ``trusted_host``.
    """
    if trusted_host is None:
        return {TLS: without_tcp(environment.get(TLS, ""))}
    interfaces = tuple(interfaces)
    own = next((interface.name for interface in interfaces if interface.address == trusted_host), None)
    if own is None:
        raise ValueError(f"no interface of this machine has the address {trusted_host}")
    requested = [name.strip() for name in environment.get(NET_DEVICES, "all").split(",")]
    names = {interface.name for interface in interfaces}
    rdma = list(rdma_ports) if "all" in requested else [name for name in requested if name and name not in names]
    return {NET_DEVICES: ",".join([*rdma, own])}


def resources(context_info: str) -> tuple[Resource, ...]:
    """Return the resources that a text of ``ucp_context_print_info`` lists."""
    return tuple(Resource(*match) for match in _RESOURCE.findall(context_info))


def rdma_resources(available: Iterable[Resource], rdma_ports: Sequence[str]) -> tuple[Resource, ...]:
    """Return the resources of ``available`` that use one of ``rdma_ports``."""
    return tuple(resource for resource in available if resource.device in rdma_ports)


def set_defaults() -> None:
    """Set the variables in SETTINGS in this process's environment, except those that are set already."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
