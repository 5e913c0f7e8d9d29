"""Check that the source of a sample is trusted: the owner of a port on this machine, and of a program's file.

Any user may listen on a free port, and create a program with any name in their own folder. The output of a port or
program is used only if the port or program belongs to root, or to the user that the site's rules name.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection

_ROOT = 0
_LISTEN_STATE = "0A"
"""State of a listening socket (linux include/net/tcp_states.h: TCP_LISTEN), in hexadecimal."""
_LOOPBACK = (
    "00000000",
    "0100007F",  # 0.0.0.0, 127.0.0.1
    "0" * 32,
    "0000000000000000FFFF000000000000",
    "0000000000000000FFFF00000100007F",  # ::, and both as IPv6
)
"""Local addresses of sockets that accept a connection to 127.0.0.1, as /proc/net/tcp and tcp6 of a little-endian
machine write them."""


class NotTrusted(Exception):
    """The source belongs to a user who is not trusted; the text names the source, its owner and the required owner."""


def trusted_uids(user: str) -> frozenset[int]:
    """Return the uids of root and of ``user`` (if given). Raises NotTrusted if this user does not exist."""
    if not user:
        return frozenset({_ROOT})
    try:
        return frozenset({_ROOT, pwd.getpwnam(user).pw_uid})
    except KeyError:
        raise NotTrusted(f'readers.dcgm_user = "{user}": there is no such user on this node') from None


def check_listener(proc: str, port: int, trusted: Collection[int]) -> None:
    """Raise NotTrusted if no process, or a process of a user who is not trusted, listens on ``port`` of 127.0.0.1.

    ``proc`` is the root of procfs. The uid in its table belongs to the process that created the listening socket (linux
    Documentation/networking/proc_net_tcp.rst).
    """
    owners = listeners(proc, port)
    if not owners:
        raise NotTrusted(f"no process listens on port {port} of 127.0.0.1")
    if strangers := owners - set(trusted):
        raise NotTrusted(
            f"port {port} of 127.0.0.1 is ignored, because it belongs to uid {min(strangers)}; it must"
            " belong to root or readers.dcgm_user"
        )


def check_program(path: str, trusted: Collection[int]) -> None:
    """Raise NotTrusted if a user who is not trusted can replace the file or a folder on its path.

    Group permissions are not checked, because a site may let a group write to /usr/local.
    """
    for place in {os.path.abspath(path), os.path.realpath(path)}:
        while True:
            status = os.stat(place)
            if status.st_uid not in trusted:
                raise NotTrusted(
                    f"{path} is not run, because {place} belongs to uid {status.st_uid}; it must belong to"
                    " root or readers.dcgm_user"
                )
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                raise NotTrusted(f"{place} is writable by every user: {path} is not run")
            if place == os.sep:
                break
            place = os.path.dirname(place)


def listeners(proc: str, port: int) -> set[int]:
    """Return the uids of the processes that listen on this port of 127.0.0.1."""
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{table}") as file:
                rows = [line.split() for line in file][1:]
        except FileNotFoundError:  # IPv6 is disabled
            continue
        for row in rows:
            address, _, number = row[1].partition(":")
            if row[3] == _LISTEN_STATE and int(number, 16) == port and address in _LOOPBACK:
                found.add(int(row[7]))
    return found
