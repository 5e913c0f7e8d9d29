"""What a member of :mod:`rrl.tests.support.weights.member` is told, and what it says: one JSON object a line."""

from __future__ import annotations

from msgspec import Struct

from rrl.core.types import Incarnation, Version
from rrl.transport.messages import WeightSource
from rrl.transport.weights.manifest import CHUNK_BYTES

MAX_LINE_BYTES = 2**20
"""bytes of one, at most"""


# ── what is said to a member ───────────────────────────────────────────────────────────────────────────────────────
class Start(Struct, frozen=True, tag=True):
    """The first command. ``nbytes``: of every version; with ``check`` each one is compared as soon as it is there."""

    incarnation: Incarnation
    kind: str
    host: str
    secret: str
    """hex"""
    nbytes: int
    check: bool = False
    chunk_by: float = 10.0
    """s, [transport] chunk_deadline"""
    chain: int = 8
    """[transport] chain"""


class Publish(Struct, frozen=True, tag=True):
    version: Version
    tensors: int = 1
    chunk_bytes: int = CHUNK_BYTES


class Peers(Struct, frozen=True, tag=True):
    """As the manager would say it: the newest version, and who serves weights."""

    newest: Version | None
    sources: tuple[WeightSource, ...]


class Check(Struct, frozen=True, tag=True):
    """Compare every byte of the newest version."""


class Forget(Struct, frozen=True, tag=True):
    """Give up every version. ``memory``: also what the store keeps of it to be written to again."""

    memory: bool = False


class Dial(Struct, frozen=True, tag=True):
    """Connect to ``at`` anew, ``times`` times, and hang up."""

    at: str
    version: Version
    times: int


class Measure(Struct, frozen=True, tag=True):
    """Tell :class:`Usage`."""


class Leave(Struct, frozen=True, tag=True):
    """Close the pipe as a role does that ends, and exit."""


Command = Start | Publish | Peers | Check | Forget | Dial | Measure | Leave


# ── what a member says ─────────────────────────────────────────────────────────────────────────────────────────────
class Serving(Struct, frozen=True, tag=True):
    """``born``: when it had its imports done; all times are of the machine's monotonic clock, in s."""

    born: float
    address: str


class Published(Struct, frozen=True, tag=True):
    version: Version
    loaded: float
    """s to have the tensors; a trainer has them anyway"""
    seconds: float
    """s to lay them out in one buffer, with digests"""


class Committed(Struct, frozen=True, tag=True):
    version: Version
    announced_at: float
    """when it heard of the version"""
    first: float
    """when its first chunk was verified"""
    at: float
    is_correct: bool | None
    """every byte; None when not compared (:class:`Check`)"""


class Failed(Struct, frozen=True, tag=True):
    version: Version
    why: str


class Checked(Struct, frozen=True, tag=True):
    version: Version | None
    is_correct: bool


class Forgot(Struct, frozen=True, tag=True):
    pass


class Dialled(Struct, frozen=True, tag=True):
    """s for each connection, handshake and a first answer included."""

    seconds: tuple[float, ...]


class Usage(Struct, frozen=True, tag=True):
    anonymous: int
    """bytes of resident memory that no file is behind"""
    descriptors: int
    threads: int
    held: tuple[Version, ...]


Report = Serving | Published | Committed | Failed | Checked | Forgot | Dialled | Usage
