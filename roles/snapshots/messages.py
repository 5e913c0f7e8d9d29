"""What is said to an agent about snapshots, by members on its node and on others."""

from __future__ import annotations

from msgspec import Struct

from ...core.types import ReplicaId
from .format import Kept


class Who(Struct, frozen=True, array_like=True):
    """On whose behalf. Whoever speaks for a life fences the earlier ones of its gang."""

    gang: ReplicaId
    rank: int
    incarnation: int


class Attach(Struct, frozen=True, tag=True):
    """I write the snapshots of this rank here from now on. Answered ``Granted`` for the buffers that are there."""

    who: Who


class Grow(Struct, frozen=True, tag=True):
    """Have this buffer made anew, with room for so many bytes. Answered ``Granted``."""

    who: Who
    slot: int
    nbytes: int


class Lend(Struct, frozen=True, tag=True):
    """Let me read it. Answered ``Granted``."""

    who: Who
    kept: Kept


class Ask(Struct, frozen=True, tag=True):
    """What is kept of this gang? Answered ``Listed``."""

    who: Who


class Forget(Struct, frozen=True, tag=True):
    """Drop what earlier lives left of this rank: mine are complete. Answered ``Listed`` with what is left."""

    who: Who


class Put(Struct, frozen=True, tag=True):
    """Answered ``Ready``; then ``meta`` and the bytes follow, and ``Listed`` with it once it counts."""

    who: Who
    kept: Kept
    meta: int


class Get(Struct, frozen=True, tag=True):
    """Answered ``Here``, then ``meta`` and the bytes."""

    who: Who
    kept: Kept


Request = Attach | Grow | Lend | Ask | Forget | Put | Get


class Granted(Struct, frozen=True, tag=True):
    """``slots``: which of the buffers the descriptors that follow are, and the room of each in bytes."""

    slots: tuple[tuple[int, int], ...]


class Listed(Struct, frozen=True, tag=True):
    kept: tuple[Kept, ...]


class Ready(Struct, frozen=True, tag=True):
    pass


class Here(Struct, frozen=True, tag=True):
    meta: int


class Refused(Struct, frozen=True, tag=True):
    why: str
    fenced: bool = False


Answer = Granted | Listed | Ready | Here | Refused
