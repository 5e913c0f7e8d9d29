"""Which of its addresses this host is reached at by the other nodes of a run."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

NETWORK_ENV = "RRL_NETWORK"
"""A network in CIDR form, for example ``10.1.0.0/16``: this host's address in it is the one to listen at."""
_SIOCGIFADDR = 0x8915
"""netdevice(7)"""


def own_address() -> str:
    """An IPv4 address: in ``$RRL_NETWORK`` if that is set; else what the host name resolves to, unless that is loopback
    (Debian's 127.0.1.1); else that of the default route; else loopback, which is right on one machine alone.

    Raises OSError when no interface has an address in ``$RRL_NETWORK``, ValueError when that is no network.
    """
    if wanted := os.environ.get(NETWORK_ENV):
        network = ipaddress.ip_network(wanted)
        for _, name in socket.if_nameindex():
            address = _address_of(name)
            if address is not None and ipaddress.ip_address(address) in network:
                return address
        raise OSError(f"{socket.gethostname()} has no interface with an address in {NETWORK_ENV}={wanted}")
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    return named if not named.startswith("127.") else _of_default_route() or named


def _of_default_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            return None
        return socket.inet_ntoa(answer[20:24])
