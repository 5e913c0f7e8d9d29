"""Who could have written what a reader reads: the owner of a port on this machine, and of a program's file.

Any user may listen on a port that nobody has, and put a program of any name into a folder of their own. What either
says counts only if it belongs to root, or to the user whom the site's rules name.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection

_ROOT = 0
_LISTEN_STATE = "0A"
"""state of a listening socket (linux include/net/tcp_states.h: TCP_LISTEN), in hexadecimal"""
_LOOPBACK = (
    "00000000", "0100007F",  # 0.0.0.0, 127.0.0.1
    "0" * 32, "0000000000000000FFFF000000000000", "0000000000000000FFFF00000100007F",  # ::, and those two in IPv6
)  # fmt: skip
"""local addresses of sockets that take a connection to 127.0.0.1, as /proc/net/tcp and tcp6 of a little-endian machine
write them"""


class NotTrusted(Exception):
    """One line: what belongs to whom, and to whom it would have to."""


def trusted_uids(user: str) -> frozenset[int]:
    """Return root's uid and that of ``user`` (empty: nobody else). Raises NotTrusted if there is no such user."""
    if not user:
        return frozenset({_ROOT})
    try:
        return frozenset({_ROOT, pwd.getpwnam(user).pw_uid})
    except KeyError:
        raise NotTrusted(f'readers.dcgm_user = "{user}": there is no such user here') from None


def check_listener(proc: str, port: int, trusted: Collection[int]) -> None:
    """Raise NotTrusted unless somebody listens on ``port`` of 127.0.0.1, and only trusted users do.

    ``proc``: the root of procfs. The uid is that of the process which made the listening socket (linux
    Documentation/networking/proc_net_tcp.rst); of an accepted connection it would say nothing.
    """
    owners = _listeners(proc, port)
    if not owners:
        raise NotTrusted(f"nobody listens on port {port} of 127.0.0.1")
    if strangers := owners - set(trusted):
        raise NotTrusted(f"port {port} of 127.0.0.1 belongs to uid {min(strangers)}: not believed, "
                         "only root or readers.dcgm_user is")  # fmt: skip


def check_program(path: str, trusted: Collection[int]) -> None:
    """Raise NotTrusted unless the file, and every folder on its way, can be replaced by trusted users only.

    Groups are not asked: a group that may write into /usr/local is the site's choice.
    """
    for one in {os.path.abspath(path), os.path.realpath(path)}:
        place = one
        while True:
            status = os.stat(place)
            if status.st_uid not in trusted:
                raise NotTrusted(f"{place} belongs to uid {status.st_uid}: not run, only what is root's or"
                                 " readers.dcgm_user's is")  # fmt: skip
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                raise NotTrusted(f"{place} can be written by everybody: {path} is not run")
            if place == os.sep:
                break
            place = os.path.dirname(place)


def _listeners(proc: str, port: int) -> set[int]:
    """Return the uids of those who listen on this port of 127.0.0.1."""
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{table}") as file:
                rows = [line.split() for line in file][1:]
        except FileNotFoundError:  # no IPv6 here
            continue
        for row in rows:
            address, _, number = row[1].partition(":")
            if row[3] == _LISTEN_STATE and int(number, 16) == port and address in _LOOPBACK:
                found.add(int(row[7]))
    return found
