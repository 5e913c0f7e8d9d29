"""Provides a mount namespace for tests, whose mounts end with its processes and are invisible to other processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys


def own_mounts() -> list[str]:
    """Return the beginning of a command line whose command may mount; empty if this machine forbids mounts."""
    argv = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    try:
        tried = subprocess.run([*argv, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return argv if tried.returncode == 0 else []


def can_hang() -> bool:
    """Return whether this process can mount a file system that hangs, which needs root, FUSE and mount namespaces."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK) and bool(own_mounts())


def hang_mount(path: str) -> int:
    """Mount a file system at ``path`` whose server never replies, so that every access to it hangs.

    Call it within :func:`own_mounts`. Returns the descriptor of the server: when it is closed, all hung accesses
    end.
    """
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hangs", path.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), f"mount {path}: {os.strerror(ctypes.get_errno())}")
    return server


def main() -> int:
    """Run a command while a file system hangs at PATH: ``python -m rrl.tests.support.mounts PATH COMMAND...``."""
    path, *command = sys.argv[1:]
    server = hang_mount(path)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        with contextlib.suppress(OSError):
            os.close(server)


if __name__ == "__main__":
    sys.exit(main())
