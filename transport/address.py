"""Which of its addresses this host is reached at by the other nodes of a run."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct

from msgspec import Struct

NETWORK_ENV = "RRL_NETWORK"
"""An interface (``ib0``) or a network in CIDR form (``10.1.0.0/16``) to listen on, where the job spec names none."""
_SIOCGIFCONF = 0x8912
"""netdevice(7): the addresses of all interfaces, further ones of the same interface too"""
_IFREQ_BYTES = 40
"""bytes of a struct ifreq: 16 of the name, then a struct sockaddr_in (two of family, two of port, the address)"""
_MAX_ADDRESSES = 256
"""addresses asked for; nodes with bridges and virtual functions have some dozens"""


class NoAddress(OSError):
    """This host has no address that it may be reached at."""


class Interface(Struct, frozen=True):
    """One IPv4 address of an interface."""

    name: str
    address: str


def own_address(network: str = "") -> str:
    """An IPv4 address on ``network`` (as :func:`interface_on`), or on ``$RRL_NETWORK``, if either is set. Otherwise the
    first of these that an interface of this host has and that is not loopback: the address that the host name resolves
    to (on Debian that is 127.0.1.1), the one of the default route, the only one that there is.

    Raises NoAddress when none is left, or several without a default route: loopback is only taken by its name.
    """
    if network_name := network or os.environ.get(NETWORK_ENV, ""):
        return interface_on(network_name).address
    outside = [one.address for one in interfaces() if not ipaddress.ip_address(one.address).is_loopback]
    for address in (_of_host_name(), _of_default_route()):
        if address in outside:
            return address
    if len(outside) == 1:
        return outside[0]
    none = "none of several addresses is that of the host name or of the default route" if outside else \
        "no address that other nodes could reach"  # fmt: skip
    raise NoAddress(f"{none}; there are {_interfaces_text()}; set [transport] network")


def interface_on(network: str) -> Interface:
    """The first interface with an address in ``network`` (CIDR), or the one of that name. Raises NoAddress."""
    found = interfaces()
    try:
        within = ipaddress.ip_network(network, strict=False)
    except ValueError:
        one = next((one for one in found if one.name == network), None)
        problem = f"no interface {network} with an IPv4 address; there are {_interfaces_text()}"
    else:
        one = next((one for one in found if ipaddress.ip_address(one.address) in within), None)
        problem = f"no interface with an address in {network}; there are {_interfaces_text()}"
    if one is None:
        raise NoAddress(problem)
    return one


def interfaces() -> list[Interface]:
    """Every IPv4 address of this host, in the kernel's order. Without IPv4 there are none."""
    buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    entries = (buffer[at : at + _IFREQ_BYTES].tobytes() for at in range(0, used, _IFREQ_BYTES))
    return [
        Interface(entry[:16].rstrip(b"\0").decode(errors="replace").partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]  # what follows a colon is the label of a further address


def _interfaces_text() -> str:
    return ", ".join(f"{one.name} {one.address}" for one in interfaces()) or "none"


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
