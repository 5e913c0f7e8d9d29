"""The keys by which a run's processes authenticate each other.

CURVE key pairs protect the control plane. An HMAC secret protects the connections that carry weights and snapshots. All
keys are generated once per run and stored in one file of the run directory that only the run's user can read (0600). A
process that can read the file counts as a process of the run. Messages of other processes are never accepted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from ..core.run_dir import write_atomically

_SECRET_BYTES = 32
"""Length of the HMAC secret in bytes, equal to the length of a SHA-256 digest."""


class RunKeys(Struct, frozen=True):
    """The keys of one run.

    CURVE keys are Z85 text (40 characters); ``secret`` is raw bytes. The repr contains no secret.
    """

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    secret: bytes
    """HMAC key for handshakes, manifests and derived keys, which protect weights and snapshots."""

    def __repr__(self) -> str:
        return f"RunKeys(server_public={self.server_public!r}, client_public={self.client_public!r}, ...)"

    @classmethod
    def make(cls) -> RunKeys:
        """Generate keys with the system's random generator."""
        import zmq  # imported here, so that commands that only read keys need not import zmq

        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(server_public, server_secret, client_public, client_secret, os.urandom(_SECRET_BYTES))

    def save(self, path: Path) -> None:
        """Write the keys durably to ``path``, readable only by the file's owner."""
        write_atomically(path, msgspec.json.encode(self), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> RunKeys:
        """Read the keys from ``path``.

        Raises:
            PermissionError: Group or others may access the file, so that the keys are no longer secret.
            OSError: The file cannot be read or is damaged.
        """
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(f"{path} has mode {mode:04o}; the run's keys must be 0600: chmod 600 {path}")
            try:
                return msgspec.json.decode(file.read(), type=cls)
            except msgspec.MsgspecError as error:
                raise OSError(f"{path} is damaged: {error}; no process can join the run without its keys") from None
