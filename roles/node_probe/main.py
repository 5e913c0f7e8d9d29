"""``python -m rrl.roles.node_probe.main FOLDER ADDRESS...``: what a compute node is like, what it sees of the login
node.

The job that ``rrl doctor`` starts where its user consents. It reads the letter that the login node put into FOLDER,
looks at the machine, tries to reach the login node at each ADDRESS (``host:port``), and leaves its report in FOLDER
and, where it got through, on that connection too: so that something is learnt even where the folder is not shared. It
ends after :data:`WITHIN` s whatever hangs.

The words on a connection, one JSON document a line: the node says ``{"nonce", "at"}``, the login node answers with the
proof that it knows the nonce; on the one connection that is kept, the login node then asks for the time again and again
(an empty line each), and the node's last line is its report.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import rrl

from ...core.run_dir import write_atomically
from ...core.text import exit_invalid_config
from .host import CommandResult, Host, Torch, Unavailable, read_host, read_torch, run_command, run_readers

PROBE_TIMEOUT_S = 10.0
"""s that the probe lives, all in all"""
_READ_TIMEOUT_S = 7.0
"""s for its readers; what is not there then is unread, and the report is written"""
_CONNECT_TIMEOUT_S = 2.0
"""s for a connection to the login node: a firewall that drops packets never answers"""
NONCE_ENV = "RRL_PROBE_NONCE"
NONCE_FILE = "nonce"
REPORT = "report.json"
_PASSED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "LD_LIBRARY_PATH")
"""of the job's environment, for sbatch: the rest are options of the job that we are in"""


class Reached(Struct, frozen=True):
    """One address of the login node. ``trouble`` is empty where it was reached."""

    address: str
    trouble: str


class NodeReport(Struct, frozen=True):
    """``folder``: why the login node's letter could not be read, empty if it was. ``rrl``: where our package lies.

    ``sbatch``: how ``sbatch --test-only`` ended there."""

    node: str
    folder: str
    rrl: str
    host: Host
    torch: Torch | Unavailable
    sbatch: CommandResult | Unavailable
    reached: tuple[Reached, ...]
    slurm_gpus: str
    """``SLURM_JOB_GPUS``: what Slurm says that it gave to the job"""


def nonce_proof(nonce: str) -> str:
    """What only the one who made ``nonce``, or was given it, can answer."""
    return hmac.digest(nonce.encode(), b"rrl doctor, login node", hashlib.sha256).hex()


def main(argv: Sequence[str]) -> int:
    """0 when the report reached the login node one way or the other as far as can be told from here, else 1."""
    if not argv or NONCE_ENV not in os.environ:
        exit_invalid_config(f"usage: {NONCE_ENV}=... python -m rrl.roles.node_probe.main FOLDER ADDRESS...")
    signal.setitimer(signal.ITIMER_REAL, PROBE_TIMEOUT_S)  # its default action ends us, whatever hangs
    folder, nonce = Path(argv[0]), os.environ[NONCE_ENV]
    results = run_readers(
        {
            "host": lambda: read_host(_READ_TIMEOUT_S - 0.5),
            "torch": lambda: read_torch(_READ_TIMEOUT_S - 0.5),
            "sbatch": _sbatch,
            "folder": lambda: _check_nonce_file(folder, nonce),
            **{f"to {address}": partial(connect_login_node, address, nonce) for address in argv[1:]},
        },
        _READ_TIMEOUT_S,
    )
    connections: dict[str, socket.socket | Unavailable] = {address: results[f"to {address}"] for address in argv[1:]}
    read, host = results["folder"], results["host"]
    if isinstance(host, Unavailable):
        host = Host(**dict.fromkeys(Host.__struct_fields__, host))
    report = NodeReport(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        folder=read.why if isinstance(read, Unavailable) else read, rrl=os.path.dirname(rrl.__file__ or ""),
        host=host, torch=results["torch"], sbatch=results["sbatch"],
        reached=tuple(Reached(at, line.why if isinstance(line, Unavailable) else "") for at, line in connections.items()),
        slurm_gpus=os.environ.get("SLURM_JOB_GPUS", ""),
    )  # fmt: skip
    return _deliver(report, folder, [line for line in connections.values() if not isinstance(line, Unavailable)])


def connect_login_node(address: str, nonce: str) -> socket.socket:
    """A connection to the login node, which has proven that it is no other. Raises OSError."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
    try:
        _send_line(connection, {"nonce": nonce, "at": address})
        answer = _receive_line(connection)
        if not hmac.compare_digest(answer.strip().decode(errors="replace"), nonce_proof(nonce)):
            raise OSError("somebody else answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_nonce_file(folder: Path, nonce: str) -> str:
    try:
        return "" if (folder / NONCE_FILE).read_text() == nonce else "the letter in it is another one"
    except OSError as error:
        return error.strerror or str(error)


def _sbatch() -> CommandResult:
    env = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ} | {"LC_ALL": "C"}
    options = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := _option(key))]
    argv = ["sbatch", "--test-only", "--nodes=1", "--ntasks=1", "--time=1", *options]
    return run_command(argv, _READ_TIMEOUT_S - 0.5, env, "#!/bin/sh\ntrue\n")


def _option(key: str) -> str:
    """What this job was submitted with: a job from here must be able to ask for the same."""
    return os.environ.get(f"SLURM_JOB_{key.upper()}", "").replace("(null)", "")


def _deliver(report: NodeReport, folder: Path, connections: Sequence[socket.socket]) -> int:
    """The file first: it shows how long the login node takes to see it. Then the connection, if there is one."""
    data, delivered = msgspec.json.encode(report), False
    if not report.folder:
        try:
            write_atomically(folder / REPORT, data)
            delivered = True
        except OSError as error:
            report = msgspec.structs.replace(report, folder=f"can be read but not written: {error.strerror}")
            data = msgspec.json.encode(report)
    for unused in connections[1:]:
        unused.close()
    for connection in connections[:1]:
        with contextlib.suppress(OSError):
            while _receive_line(connection) == b"\n":
                _send_line(connection, {"clock": time.time()})
            connection.sendall(data + b"\n")
            delivered = True
    return 0 if delivered else 1


def _send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(msgspec.json.encode(message) + b"\n")


def _receive_line(connection: socket.socket) -> bytes:
    """One line with its end; raises OSError when there is none."""
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(received) > 200:
            raise OSError("the login node hung up")
        received += piece
    return received


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
