"""Lists all sockets that the processes of a run have bound, with the addresses from which they can be reached."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

_LISTENS, _UNCONNECTED = "0A", "07"
"""States of TCP and UDP sockets that accept data from any sender (include/net/tcp_states.h)."""
_ACCEPTS = 0x10000
"""__SO_ACCEPTCON in the flags of /proc/net/unix: the socket listens."""


class PartBound(Struct, frozen=True, order=True):
    """A socket on which a process listens."""

    pid: int
    kind: str
    """``tcp``, ``udp``, or ``unix`` for a name in the abstract namespace, to which any user of the node may connect."""
    address: str
    port: int = 0

    @property
    def stays_on_this_machine(self) -> bool:
        return self.kind == "unix" or ipaddress.ip_address(self.address).is_loopback


def bound_by(pids: Iterable[int]) -> list[PartBound]:
    """Return the bound sockets of these processes; a process that has just ended has none."""
    return sorted({one for pid in pids for one in _of(pid)})


def _of(pid: int) -> Iterator[PartBound]:
    process = Path("/proc", str(pid))
    with contextlib.suppress(OSError):
        inodes = _inodes(process)
        for kind, state in (("tcp", _LISTENS), ("udp", _UNCONNECTED)):
            for table in (process / "net" / kind, process / "net" / f"{kind}6"):
                for line in table.read_text().splitlines()[1:] if table.exists() else ():
                    _, local, _, is_in, *rest = line.split()
                    if is_in == state and rest[5] in inodes:
                        address, port = local.split(":")
                        yield PartBound(pid, kind, _address(address), int(port, 16))
        for line in (process / "net/unix").read_text().splitlines()[1:]:
            _, _, _, flags, _, _, inode, *name = line.split(maxsplit=7)
            if inode in inodes and int(flags, 16) & _ACCEPTS and name and name[0].startswith("@"):
                yield PartBound(pid, "unix", name[0])


def _inodes(process: Path) -> set[str]:
    found = set()
    for entry in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(process / "fd" / entry)
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _address(text: str) -> str:
    """Convert an address of /proc, in which each 32-bit word has the byte order of the machine."""
    words = (bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
