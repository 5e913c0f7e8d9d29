"""Check the network and the metrics' port for a manager that is to run on this machine."""

from __future__ import annotations

import errno
import socket

from ...transport.address import NoAddress, interface_on, resolve


def network_problem(network: str) -> str:
    """Return why this machine cannot listen on ``[transport] network``; empty if it can, or if no network is named."""
    if not network:
        return ""
    try:
        interface_on(network)
    except NoAddress as error:
        return str(error)
    return ""


def metrics_problem(address: str) -> str:
    """Return why ``[health] metrics`` cannot be served on this machine; empty if it can.

    ``address`` is ``host:port``, or empty for no metrics. The port is bound for a moment, as the manager will bind it.
    """
    if not address or address.endswith(":0"):
        return ""
    try:
        listen = resolve(address)
        with socket.socket(listen.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(listen.socket_address)
            probe.listen(1)  # with SO_REUSEADDR, bind() accepts a port on which another process may yet listen
    except (OSError, ValueError) as error:  # ValueError: a label of the host name is too long
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return "the port is taken" if taken else str(getattr(error, "strerror", None) or error)
    return ""
