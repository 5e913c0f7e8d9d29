"""The commands and reports of a :mod:`rrl.tests.support.weights.member`: one JSON object per line."""

from __future__ import annotations

from msgspec import Struct

from rrl.core.run_spec import DeltaSetting
from rrl.core.types import Incarnation, Version, WeightTraffic
from rrl.transport.weights.manifest import CHUNK_BYTES
from rrl.transport.weights.pull import WeightSource

MAX_LINE_BYTES = 2**20
"""Largest size of a line in bytes."""


# ── commands to a member ───────────────────────────────────────────────────────────────────────────────────────────
class Start(Struct, frozen=True, tag=True):
    """The first command.

    ``nbytes`` is the size of every version. With ``check`` each version is compared when it is complete.
    """

    incarnation: Incarnation
    kind: str
    host: str
    secret: str
    """Secret of the run, in hexadecimal."""
    nbytes: int
    check: bool = False
    chunk_by: float = 10.0
    """Value of ``[transport] chunk_deadline`` in s."""
    chain: int = 8
    """Value of ``[transport] chain``."""
    delta: DeltaSetting = False
    """Value of ``[transport] delta``."""


class Publish(Struct, frozen=True, tag=True):
    version: Version
    tensors: int = 1
    chunk_bytes: int = CHUNK_BYTES
    file: str = ""
    """File with the bytes of the version; if empty, they are its :func:`.sparse.sparse_content`."""


class Peers(Struct, frozen=True, tag=True):
    """The messages of manager and store: the newest version, and the processes that serve weights."""

    newest: Version | None
    sources: tuple[WeightSource, ...]


class Check(Struct, frozen=True, tag=True):
    """Command: compare every byte of the newest version, with those of :attr:`Publish.file` if it is not empty."""

    file: str = ""


class Forget(Struct, frozen=True, tag=True):
    """Command: discard every version; with ``memory``, also the buffer that the store keeps for the next version."""

    memory: bool = False


class Dial(Struct, frozen=True, tag=True):
    """Command: connect to ``at`` and disconnect, ``times`` times."""

    at: str
    version: Version
    times: int


class Measure(Struct, frozen=True, tag=True):
    """Command: report the resources of the process (:class:`Usage`)."""


class Leave(Struct, frozen=True, tag=True):
    """Command: close the transport as a role does when it ends, and exit."""


Command = Start | Publish | Peers | Check | Forget | Dial | Measure | Leave


# ── reports of a member ────────────────────────────────────────────────────────────────────────────────────────────
class Serving(Struct, frozen=True, tag=True):
    """Report that the member serves.

    ``born`` is the time at which the member's imports were done. All times are in s, by the machine's monotonic clock.
    """

    born: float
    address: str


class Published(Struct, frozen=True, tag=True):
    version: Version
    loaded: float
    """Seconds to create the tensors, which a real trainer already has."""
    seconds: float
    """Seconds to copy the tensors into one buffer, with digests."""


class Committed(Struct, frozen=True, tag=True):
    version: Version
    announced_at: float
    """Time at which the member received the message about the version."""
    first: float
    """Time at which the first chunk was verified."""
    at: float
    is_correct: bool | None
    """Whether every byte is right; None if the version was not compared (:class:`Check`)."""
    traffic: WeightTraffic
    """What the member has received until then."""


class Failed(Struct, frozen=True, tag=True):
    version: Version
    why: str


class Checked(Struct, frozen=True, tag=True):
    version: Version | None
    is_correct: bool


class Forgot(Struct, frozen=True, tag=True):
    pass


class Dialled(Struct, frozen=True, tag=True):
    """Report of the seconds for each connection, including the handshake and the first answer."""

    seconds: tuple[float, ...]


class Usage(Struct, frozen=True, tag=True):
    anonymous: int
    """Resident memory (bytes) that is not backed by a file."""
    descriptors: int
    threads: int
    held: tuple[Version, ...]


Report = Serving | Published | Committed | Failed | Checked | Forgot | Dialled | Usage
