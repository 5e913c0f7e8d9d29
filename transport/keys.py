"""What a run's processes know each other by: CURVE pairs for the control plane, an HMAC secret for the weight plane.

Made once per run, kept in one file of the run directory that only the run's user can read (0600). Who can read it
belongs to the run; nothing else is ever believed on any port of ours.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from ..core.run_dir import write_atomically

_SECRET_BYTES = 32
"""as long as the output of SHA-256, with which the secret is used"""


class RunKeys(Struct, frozen=True):
    """CURVE keys are Z85 text (40 characters); ``secret`` is raw bytes. Its repr shows none of the secrets."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    secret: bytes
    """HMAC key of the weight plane: handshakes and manifests"""

    def __repr__(self) -> str:
        return f"RunKeys(server_public={self.server_public!r}, client_public={self.client_public!r}, ...)"

    @classmethod
    def make(cls) -> RunKeys:
        """Fresh keys from the system's generator."""
        import zmq  # here, because reading keys must not cost a command on the login node the import of zmq

        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(server_public, server_secret, client_public, client_secret, os.urandom(_SECRET_BYTES))

    def save(self, path: Path) -> None:
        """Write to ``path``, readable by its owner alone, durable when it returns."""
        write_atomically(path, msgspec.json.encode(self), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> RunKeys:
        """Read ``path``. Raises PermissionError when group or others may touch it: such keys are no longer secret; or
        another OSError when it cannot be read or is damaged."""
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(f"{path} has mode {mode:04o}; the run's keys must be 0600: chmod 600 {path}")
            try:
                return msgspec.json.decode(file.read(), type=cls)
            except msgspec.MsgspecError as error:
                raise OSError(f"{path} is damaged: {error}; without the run's keys nobody can join it") from None
