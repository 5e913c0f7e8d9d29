"""One line of the answer, made. The fix is the catalogue's unless a check knows a better one."""

from __future__ import annotations

from rrl.cli.doctor.facts import Check
from rrl.cli.doctor.meanings import MEANINGS
from rrl.roles.host import Unread
from rrl.spec.words import Verdict


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warn(name: str, found: str, fix: str | None = None) -> Check:
    return Check(name, Verdict.WARN, found, MEANINGS[name].fix if fix is None else fix)


def fail(name: str, found: str, fix: str | None = None) -> Check:
    return Check(name, Verdict.FAIL, found, MEANINGS[name].fix if fix is None else fix)


def unknown(name: str, why: Unread | str, fix: str = "") -> Check:
    """Nobody knows: neither good nor bad."""
    return Check(name, Verdict.UNKNOWN, why.why if isinstance(why, Unread) else why, fix)


def size(nbytes: int) -> str:
    """Bytes for a person: two digits, largest unit."""
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= length:
            return f"{nbytes / length:.3g} {unit}" if nbytes < 1000 * length else f"{nbytes / length:.0f} {unit}"
    return f"{nbytes} bytes"


def limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
