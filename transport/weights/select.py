"""Select the weight transport of a process: what ``[transport] weights`` means on this machine, and why.

:func:`choose` decides from values alone, so that ``rrl check`` can say what a role would do.
"""

from __future__ import annotations

import logging

from msgspec import Struct

from .base import PACKAGES, Pipe, PipeError, package
from .ucx_settings import active_rdma_ports

_log = logging.getLogger("rrl.weights")


class Here(Struct, frozen=True):
    """What decides on this machine how weights travel."""

    packages: frozenset[str]
    """kinds of pipes (``ucx``, ``nixl``) whose package is installed"""
    rdma_ports: tuple[str, ...]
    """active ports of RDMA devices: ``mlx5_0:1``"""


class Choice(Struct, frozen=True):
    kind: str
    """``tcp``, ``ucx`` or ``nixl``"""
    why: str
    over_tcp: bool = False
    """UCX may use its TCP transport"""


class Untrusted(PipeError):
    """UCX over TCP on a network that the job does not call trusted."""


def choose(kind: str, here: Here, trusted_network: bool) -> Choice:
    """What ``[transport] weights`` means on a machine. Raises Untrusted, and ValueError for an unknown kind."""
    if kind == "auto":
        return _choose_auto(here)
    if kind == "tcp":
        return Choice("tcp", "the job asks for tcp")
    if kind not in PACKAGES:
        raise ValueError(f'pipe {kind!r} is unknown; write "auto", "ucx", "tcp" or "nixl"')
    if trusted_network:
        return Choice(kind, f"the job asks for {kind}, and trusts its network", over_tcp=True)
    if not here.rdma_ports:
        raise Untrusted(
            f"{kind} over TCP lets everybody who reaches its ports read and write the memory of the roles, and this"
            ' machine has no active RDMA port; write weights = "auto", or trusted_network = true where nobody else'
            " is on that network or these machines (docs/sites.md)"
        )
    return Choice(kind, f"the job asks for {kind}; it goes over {', '.join(here.rdma_ports)} without TCP")


def _choose_auto(here: Here) -> Choice:
    if not here.rdma_ports:
        return Choice("tcp", "this machine has no active RDMA port")
    ports = ", ".join(here.rdma_ports)
    if "ucx" not in here.packages:
        return Choice("tcp", f"{ports} would serve RDMA, but ucxx is not installed here (docs/rdma.md)")
    return Choice("ucx", f"{ports} may serve RDMA")


def look_here() -> Here:
    """Return what this machine has: packages by name, and RDMA ports. Imports nothing."""
    return Here(frozenset(kind for kind in PACKAGES if package(kind) is not None), active_rdma_ports())


def open_pipe(
    kind: str, secret: bytes, *, host: str = "127.0.0.1", trusted_network: bool = False, here: Here | None = None
) -> Pipe:
    """The pipe that ``kind`` (``auto``, ``ucx``, ``tcp``, ``nixl``) means here; its ``kind`` says which, the log says
    why.

    ``host``: the address that this process serves at. Where ``trusted_network`` lets UCX use TCP, it listens there and
    nowhere else. ``here``: this machine, unless the caller has looked already.
    Must be called in the loop that will use the pipe. Raises ImportError when what is asked for by name is not
    installed, and PipeError when it cannot be used here: ``auto`` takes tcp instead.
    """
    from .tcp import TcpPipe
    from .ucx import UcxPipe

    here = look_here() if here is None else here
    choice = choose(kind, here, trusted_network)
    trusted_host = host if choice.over_tcp else None
    if choice.kind == "nixl":
        from .nixl import NixlPipe  # needs numpy, which comes with NIXL

        pipe: Pipe = NixlPipe(secret, trusted_host, here.rdma_ports)
    elif choice.kind == "ucx":
        try:
            pipe = UcxPipe(secret, trusted_host, here.rdma_ports)
        except (PipeError, ImportError) as error:
            if kind == "ucx":
                raise
            _log.warning("weights move over tcp, not over %s: %s", ", ".join(here.rdma_ports), error)
            return TcpPipe(secret)
    else:
        pipe = TcpPipe(secret)
    level = logging.WARNING if kind == "auto" and choice.kind == "tcp" and here.rdma_ports else logging.INFO
    _log.log(level, "weights move over %s: %s", choice.kind, choice.why)
    return pipe
