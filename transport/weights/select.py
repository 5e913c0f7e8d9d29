"""Select the weight transport of a process from ``[transport] weights`` and the capabilities of this machine.

:func:`select_transport` depends on its arguments only, so that ``rrl check`` can show what a role would select.
"""

from __future__ import annotations

import logging
from typing import assert_never, get_args

from msgspec import Struct

from ...core.run_spec import WeightsSetting, WeightTransportName
from ..streams.connection import TransportError
from .base import PACKAGES, WeightTransport, installed_package
from .ucx_settings import active_rdma_ports

_log = logging.getLogger("rrl.weights")
_NAMES: tuple[WeightTransportName, ...] = get_args(WeightTransportName)


class Capabilities(Struct, frozen=True):
    """The packages and RDMA ports of this machine, which decide which weight transports it can use."""

    packages: frozenset[WeightTransportName]
    """Transports whose Python package is installed."""
    rdma_ports: tuple[str, ...]
    """Active ports of RDMA devices, for example ``mlx5_0:1``."""


class Choice(Struct, frozen=True):
    """The selected transport and the reason."""

    kind: WeightTransportName
    reason: str
    over_tcp: bool = False
    """True if UCX may use its TCP transport."""


class UntrustedNetwork(TransportError):
    """UCX would use TCP on a network that the job does not declare as trusted."""


def select_transport(kind: str, capabilities: Capabilities, trusted_network: bool) -> Choice:
    """Return the transport for the value ``kind`` of ``[transport] weights`` on a machine, with the reason.

    Raises:
        UntrustedNetwork: The transport would use TCP on an untrusted network.
        ValueError: The kind is unknown.
    """
    if kind == "auto":
        return _select_auto(capabilities)
    name = next((name for name in _NAMES if name == kind), None)
    if name is None:
        known = ", ".join(f'"{setting}"' for setting in get_args(WeightsSetting))
        raise ValueError(f"unknown weight transport {kind!r}; write one of {known}")
    if name == "tcp":
        return Choice(name, "the job requests tcp")
    if trusted_network:
        return Choice(name, f"the job requests {kind} and trusts its network", over_tcp=True)
    if not capabilities.rdma_ports:
        raise UntrustedNetwork(
            f"{kind} over TCP lets every user who reaches its ports read and write the memory of the roles. This"
            f' machine has no active RDMA port, so {kind} would use TCP. In [transport] write weights = "auto", or, if'
            " nobody else uses the network and these machines, trusted_network = true (docs/sites.md)"
        )
    return Choice(name, f"the job requests {kind}; it uses {', '.join(capabilities.rdma_ports)} without TCP")


def _select_auto(capabilities: Capabilities) -> Choice:
    if not capabilities.rdma_ports:
        return Choice("tcp", "this machine has no active RDMA port")
    ports = ", ".join(capabilities.rdma_ports)
    if "ucx" not in capabilities.packages:
        return Choice("tcp", f"{ports} would support RDMA, but ucxx is not installed here (docs/rdma.md)")
    return Choice("ucx", f"{ports} may support RDMA")


def detect_capabilities() -> Capabilities:
    """Return the installed packages and the active RDMA ports of this machine. Imports no package."""
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
    """Open the transport that :func:`select_transport` chooses on this machine, and log the reason.

    Must be called in the event loop that will use the transport. ``auto`` falls back to tcp if UCX cannot be used.

    Args:
        kind: ``[transport] weights``.
        secret: HMAC secret of the run.
        host: Address at which this process serves. If UCX may use TCP, it listens only at this address.
        trusted_network: ``[transport] trusted_network``.
        capabilities: Packages and RDMA ports of this machine. If None, they are detected.

    Raises:
        ImportError: A transport that was requested by name is not installed.
        TransportError: A transport that was requested by name cannot be used on this machine.
    """
    from .tcp import TcpTransport
    from .ucx import UcxTransport

    capabilities = detect_capabilities() if capabilities is None else capabilities
    choice = select_transport(kind, capabilities, trusted_network)
    trusted_host = host if choice.over_tcp else None
    transport: WeightTransport
    match choice.kind:
        case "tcp":
            transport = TcpTransport(secret)
        case "ucx":
            try:
                transport = UcxTransport(secret, trusted_host, capabilities.rdma_ports)
            except (TransportError, ImportError) as error:
                if kind == "ucx":
                    raise
                _log.warning(
                    "weight transport: tcp, because UCX over %s fails: %s", ", ".join(capabilities.rdma_ports), error
                )
                return TcpTransport(secret)
        case "nixl":
            from .nixl import NixlTransport  # imported here: it needs numpy, which comes with NIXL

            transport = NixlTransport(secret, trusted_host, capabilities.rdma_ports)
        case _:  # so that mypy reports a transport without a case
            assert_never(choice.kind)
    level = logging.WARNING if kind == "auto" and choice.kind == "tcp" and capabilities.rdma_ports else logging.INFO
    _log.log(level, "weight transport: %s: %s", choice.kind, choice.reason)
    return transport
