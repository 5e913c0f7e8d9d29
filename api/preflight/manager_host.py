"""Check the network and the metrics' port for a manager that will run on this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket

from ...cluster.traits import ClusterTraits
from ...transport.address import NoAddress, interface_on, resolve

LOOPBACK_INTERFACE = "lo"
"""Linux's name of the loopback interface, on every machine."""


def network_problem(network: str) -> str:
    """Return why this machine cannot listen on ``[transport] network``; empty if it can listen or none is named."""
    if not network:
        return ""
    try:
        interface_on(network)
    except NoAddress as error:
        return str(error)
    return ""


def listens_on_loopback(cluster: ClusterTraits, network: str) -> bool:
    """Return whether the processes of a run listen on loopback addresses, as far as this machine can tell.

    Args:
        cluster: Traits of the cluster.
        network: ``[transport] network``; if it is empty, roles on this machine stay on it.
    """
    if not network:
        return cluster.roles_run_here
    try:
        return ipaddress.ip_network(network, strict=False).is_loopback
    except ValueError:
        return network == LOOPBACK_INTERFACE


def metrics_problem(address: str) -> str:
    """Return why ``[health] metrics`` cannot be served on this machine; empty if they can be served.

    ``address`` is ``host:port``, or empty for no metrics. The port is bound for a moment, as the manager will bind it.
    """
    if not address or address.endswith(":0"):
        return ""
    try:
        listen = resolve(address)
        with socket.socket(listen.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(listen.socket_address)
            probe.listen(1)  # with SO_REUSEADDR, bind() alone may succeed on a taken port
    except (OSError, ValueError) as error:  # ValueError: a label of the host name is too long
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return "the port is taken" if taken else str(getattr(error, "strerror", None) or error)
    return ""
