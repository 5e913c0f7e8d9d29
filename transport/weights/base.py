"""The interface of the weight transports.

The transports (:data:`rrl.core.run_spec.WeightTransportName`) differ only in their connections
(:class:`rrl.transport.streams.connection.Connection`); they share the protocol in
:mod:`rrl.transport.weights.protocol`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...core.run_spec import WeightTransportName
from ...core.types import Version
from ..streams.connection import TransportError

if TYPE_CHECKING:  # commands that ask for a transport's name do not need numpy
    from .manifest import Manifest
    from .store import WeightStore

STARVATION_TIMEOUT_S = 3.0
"""Seconds for which a source may reply only NOT_READY before the receiver gives the source up. A source that is itself
receiving may have to wait until its own first and second source have timed out, and must not be given up before."""
PACKAGES: dict[WeightTransportName, tuple[str, ...]] = {"ucx": ("ucxx",), "nixl": ("nixl_cu12", "nixl_cu13")}
"""For each transport that needs a Python package, the alternative packages, of which one must be installed. The extra
with the transport's name installs one of these packages. (The package ``nixl`` installs ``nixl_cu12`` and
``nixl_cu13``, and selects one of them.)"""


class VersionUnavailable(TransportError):
    """The source works, but neither has this version nor is receiving it. Its connection remains usable."""


class BaseUnknown(TransportError):
    """The source works, but knows no changes from the base that the request names. Its connection remains usable."""


class WeightTransport(Protocol):
    """A transport of weight versions. Every failure is a TransportError.

    A source that is still receiving the requested chunk replies NOT_READY every ``protocol.NOT_READY_INTERVAL_S`` until
    it has verified the chunk. ``timeout`` (s) limits silence: it starts once all earlier replies on the connection have
    arrived, and restarts at each NOT_READY. ``starvation_timeout`` (s) limits the time during which the source replies
    only NOT_READY, from the first NOT_READY on.
    """

    kind: WeightTransportName
    """Name of the transport, which is also the scheme of its addresses."""

    async def serve(self, store: WeightStore, host: str) -> str:
        """Serve the complete versions of ``store``, and each chunk of an arriving version once it is verified.

        Returns:
            The address for other processes: ``<kind>://host:port``.
        """

    async def manifest(
        self, address: str, version: Version, timeout: float, starvation_timeout: float = STARVATION_TIMEOUT_S
    ) -> Manifest:
        """Return the verified manifest of a version.

        Raises:
            VersionUnavailable: The source does not have the version.
            TransportError: The source failed, or its manifest is not signed with the run's secret.
        """

    async def fetch(
        self,
        address: str,
        version: Version,
        span: range,
        into: memoryview,
        timeout: float,
        starvation_timeout: float = STARVATION_TIMEOUT_S,
        base: bytes | None = None,
    ) -> bytearray | None:
        """Fetch bytes ``span`` of a version into ``into``, which is never written to after the call has ended.

        If ``span`` is a chunk, ``base`` is the digest of the same chunk of a version that this process has. Then the
        source may send a frame (:mod:`.delta`) instead. It is returned, and nothing is written into ``into``.

        Raises:
            VersionUnavailable: The source does not have the version.
            BaseUnknown: The source does not know the changes from the base.
            TransportError: The source failed.
        """

    def disconnect(self, address: str) -> None:
        """Drop the connection to an address, because the source sent wrong bytes or is gone."""

    async def close(self) -> None:
        """Stop serving and drop every connection; may be called again."""


def parse_address(address: str, kinds: Sequence[str]) -> tuple[str, int]:
    """Return host and port of an address ``<kind>://host:port``.

    Raises:
        TransportError: The address is malformed, or its kind is not among ``kinds``.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in kinds or not host or not port.isdigit():
        raise TransportError(f"{address!r} is not an address of the weight transport {' or '.join(kinds)}")
    return host, int(port)


def installed_package(kind: WeightTransportName) -> str | None:
    """Return the transport's Python package that is installed here, without importing it; None if there is none."""
    return next((name for name in PACKAGES[kind] if importlib.util.find_spec(name) is not None), None)
