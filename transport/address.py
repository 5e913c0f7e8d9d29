"""Find the address at which the other nodes of a run can reach this host, and resolve addresses to listen at."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from typing import Any

from msgspec import Struct

NETWORK_ENV = "RRL_NETWORK"
"""Environment variable that names the interface (``ib0``) or the network (``10.1.0.0/16``) to listen on. It applies if
the job spec names neither."""
_SIOCGIFCONF = 0x8912
"""Request number of ioctl (netdevice(7)): all addresses of all interfaces."""
_IFREQ_BYTES = 40
"""Bytes of a struct ifreq: 16 bytes for the name, then a struct sockaddr_in (two bytes for the family, two bytes for
the port, then the address)."""
_MAX_ADDRESSES = 256
"""Maximum number of addresses that are read; nodes with bridges and virtual functions have some dozens."""


class NoAddress(OSError):
    """This host has no address at which other nodes could reach it."""


class Interface(Struct, frozen=True):
    """One IPv4 address of an interface."""

    name: str
    address: str


class ListenAddress(Struct, frozen=True):
    """A resolved ``host:port`` of this host."""

    host: str
    """The host as it was given, without brackets: a name or an address."""
    family: socket.AddressFamily
    socket_address: tuple[Any, ...]
    """Address to which a socket of ``family`` can be bound."""


def resolve(address: str) -> ListenAddress:
    """Resolve ``host:port``; brackets enclose an IPv6 address. Port 0 selects a free port.

    Raises:
        OSError: The host cannot be resolved.
        ValueError: The port is not a number, or a label of the host name is too long.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family, *_, found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return ListenAddress(host, family, (found[0], int(port), *found[2:]))


def own_address(network: str = "") -> str:
    """Return the IPv4 address of this host that other nodes of the run can reach.

    If ``network`` (see :func:`interface_on`) or ``$RRL_NETWORK`` is set, return the address on that network. Otherwise
    return the address of the host name, else the address of the default route, else the only address of the host.
    Loopback addresses and addresses that no interface of this host has are skipped: on Debian the host name may resolve
    to 127.0.1.1.

    Raises:
        NoAddress: No address qualifies, or several do and none of them is the address of the default route. A loopback
            address is used only if ``network`` or ``$RRL_NETWORK`` names it.
    """
    if network_name := network or os.environ.get(NETWORK_ENV, ""):
        return interface_on(network_name).address
    candidates = [item.address for item in interfaces() if not ipaddress.ip_address(item.address).is_loopback]
    for address in (_of_host_name(), _of_default_route()):
        if address in candidates:
            return address
    if len(candidates) == 1:
        return candidates[0]
    problem = "this host has no address that other nodes could reach"
    if candidates:
        problem = "no address of this host belongs to its host name or to its default route"
    raise NoAddress(
        f"{problem}; there are {_interfaces_text()}; set `network` in [transport] to the one that other nodes reach"
    )


def interface_on(network: str) -> Interface:
    """Return the first interface with an address in ``network`` (CIDR), or the interface whose name is ``network``.

    Raises:
        NoAddress: No interface with an IPv4 address matches.
    """
    candidates = interfaces()
    try:
        subnet = ipaddress.ip_network(network, strict=False)
    except ValueError:
        interface = next((item for item in candidates if item.name == network), None)
        problem = f"no interface {network} with an IPv4 address; there are {_interfaces_text()}"
    else:
        interface = next((item for item in candidates if ipaddress.ip_address(item.address) in subnet), None)
        problem = f"no interface with an address in {network}; there are {_interfaces_text()}"
    if interface is None:
        raise NoAddress(problem)
    return interface


def interfaces() -> list[Interface]:
    """Return every IPv4 address of this host, in the kernel's order; empty if the host has none."""
    buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    entries = (buffer[at : at + _IFREQ_BYTES].tobytes() for at in range(0, used, _IFREQ_BYTES))
    return [
        Interface(entry[:16].rstrip(b"\0").decode(errors="replace").partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]  # the name of an additional address is the interface's name, a colon and a label


def _interfaces_text() -> str:
    return ", ".join(f"{item.name} {item.address}" for item in interfaces()) or "none"


def _of_host_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _of_default_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])
