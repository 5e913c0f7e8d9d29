"""A mount namespace of one's own: what is mounted there is gone with its processes, and nobody else sees it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys


def own_mounts() -> list[str]:
    """What to put before a command line so that it may mount; empty where this machine does not permit it."""
    argv = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    try:
        tried = subprocess.run([*argv, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return argv if tried.returncode == 0 else []


def can_hang() -> bool:
    """This machine can mount a file system that hangs: root, FUSE, and mount namespaces."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK) and bool(own_mounts())


def hang_mount(path: str) -> int:
    """Mount a file system at ``path`` whose server never answers, so that whoever looks at it hangs. Call it within
    :func:`own_mounts`. Returns the server's descriptor: once it is closed, all that hangs there ends."""
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hangs", path.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), f"mount {path}: {os.strerror(ctypes.get_errno())}")
    return server


def main() -> int:
    """``python -m rrl.tests.support.mounts PATH COMMAND...``: run a command while a file system hangs at PATH."""
    path, *command = sys.argv[1:]
    server = hang_mount(path)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        with contextlib.suppress(OSError):
            os.close(server)


if __name__ == "__main__":
    sys.exit(main())
