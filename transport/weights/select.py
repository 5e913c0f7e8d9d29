"""Select the weight transport of a process: what ``[transport] weights`` means on this machine, and why.

:func:`choose` decides from values alone, so that ``rrl check`` can say what a role would do.
"""

from __future__ import annotations

import logging

from msgspec import Struct

from .base import PACKAGES, TransportError, WeightTransport, installed_package
from .ucx_settings import active_rdma_ports

_log = logging.getLogger("rrl.weights")


class Capabilities(Struct, frozen=True):
    """What decides on this machine how weights travel."""

    packages: frozenset[str]
    """kinds of pipes (``ucx``, ``nixl``) whose package is installed"""
    rdma_ports: tuple[str, ...]
    """active ports of RDMA devices: ``mlx5_0:1``"""


class Choice(Struct, frozen=True):
    kind: str
    """``tcp``, ``ucx`` or ``nixl``"""
    reason: str
    over_tcp: bool = False
    """UCX may use its TCP transport"""


class UntrustedNetwork(TransportError):
    """UCX over TCP on a network that the job does not call trusted."""


def select_transport(kind: str, capabilities: Capabilities, trusted_network: bool) -> Choice:
    """What ``[transport] weights`` means on a machine. Raises Untrusted, and ValueError for an unknown kind."""
    if kind == "auto":
        return _select_auto(capabilities)
    if kind == "tcp":
        return Choice("tcp", "the job asks for tcp")
    if kind not in PACKAGES:
        raise ValueError(f'pipe {kind!r} is unknown; write "auto", "ucx", "tcp" or "nixl"')
    if trusted_network:
        return Choice(kind, f"the job asks for {kind}, and trusts its network", over_tcp=True)
    if not capabilities.rdma_ports:
        raise UntrustedNetwork(
            f"{kind} over TCP lets everybody who reaches its ports read and write the memory of the roles, and this"
            ' machine has no active RDMA port; write weights = "auto", or trusted_network = true where nobody else'
            " is on that network or these machines (docs/sites.md)"
        )
    return Choice(kind, f"the job asks for {kind}; it goes over {', '.join(capabilities.rdma_ports)} without TCP")


def _select_auto(capabilities: Capabilities) -> Choice:
    if not capabilities.rdma_ports:
        return Choice("tcp", "this machine has no active RDMA port")
    ports = ", ".join(capabilities.rdma_ports)
    if "ucx" not in capabilities.packages:
        return Choice("tcp", f"{ports} would serve RDMA, but ucxx is not installed here (docs/rdma.md)")
    return Choice("ucx", f"{ports} may serve RDMA")


def detect_capabilities() -> Capabilities:
    """Return what this machine has: packages by name, and RDMA ports. Imports nothing."""
    return Capabilities(
        frozenset(kind for kind in PACKAGES if installed_package(kind) is not None), active_rdma_ports()
    )


def open_transport(
    kind: str,
    secret: bytes,
    *,
    host: str = "127.0.0.1",
    trusted_network: bool = False,
    capabilities: Capabilities | None = None,
) -> WeightTransport:
    """The pipe that ``kind`` (``auto``, ``ucx``, ``tcp``, ``nixl``) means here; its ``kind`` says which, the log says
    why.

    ``host``: the address that this process serves at. Where ``trusted_network`` lets UCX use TCP, it listens there and
    nowhere else. ``here``: this machine, unless the caller has looked already.
    Must be called in the loop that will use the pipe. Raises ImportError when what is asked for by name is not
    installed, and PipeError when it cannot be used here: ``auto`` takes tcp instead.
    """
    from .tcp import TcpTransport
    from .ucx import UcxTransport

    capabilities = detect_capabilities() if capabilities is None else capabilities
    choice = select_transport(kind, capabilities, trusted_network)
    trusted_host = host if choice.over_tcp else None
    if choice.kind == "nixl":
        from .nixl import NixlTransport  # needs numpy, which comes with NIXL

        transport: WeightTransport = NixlTransport(secret, trusted_host, capabilities.rdma_ports)
    elif choice.kind == "ucx":
        try:
            transport = UcxTransport(secret, trusted_host, capabilities.rdma_ports)
        except (TransportError, ImportError) as error:
            if kind == "ucx":
                raise
            _log.warning("weights move over tcp, not over %s: %s", ", ".join(capabilities.rdma_ports), error)
            return TcpTransport(secret)
    else:
        transport = TcpTransport(secret)
    level = logging.WARNING if kind == "auto" and choice.kind == "tcp" and capabilities.rdma_ports else logging.INFO
    _log.log(level, "weights move over %s: %s", choice.kind, choice.reason)
    return transport
