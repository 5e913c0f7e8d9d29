"""Probe a compute node for ``rrl doctor``: ``python -m rrl.cli.doctor.node_probe.main FOLDER ADDRESS...``.

``rrl doctor`` submits this program as a job if its user consents. The probe checks that the login node wrote the nonce
file in FOLDER for this probe. It reads the machine, and connects to the login node at each ADDRESS (``host:port``). It
writes its report into FOLDER and also sends it over the first connection that succeeded, so that a report arrives even
if FOLDER is not shared. It ends after :data:`PROBE_TIMEOUT_S` at the latest.

The protocol on a connection is one JSON document per line: the node's :class:`Hello`, the :class:`Welcome` of the
login node, and on the first successful connection the report.
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

import msgspec
from msgspec import Struct

import rrl

from ....cluster.slurm.commands import environment
from ....core.command_runner import CommandResult, run
from ....core.run_dir import write_atomically
from ....core.text import exit_invalid_config
from .host import Host, Torch, Unavailable, read_host, read_torch, run_readers

PROBE_TIMEOUT_S = 10.0
"""Maximum duration (s) of the probe."""
_READ_TIMEOUT_S = 7.0
"""Timeout (s) of the readers. Results that are missing after this time are reported as unavailable."""
_MAX_LINE_BYTES = 200
"""Maximum length in bytes of the Welcome."""
_CONNECT_TIMEOUT_S = 2.0
"""Timeout (s) of a connection to the login node. It is needed, because a firewall that drops packets never answers."""
_FOREIGN = "another program answered: it does not know the probe's nonce"
NONCE_ENV = "RRL_PROBE_NONCE"
"""Environment variable with the nonce that the login node made for this probe."""
NONCE_FILE = "nonce"
"""Name of the file in FOLDER into which the login node writes the nonce."""
REPORT = "report.json"
"""Name of the report in FOLDER."""


class Hello(Struct, frozen=True):
    """The first line of the node."""

    nonce: str


class Welcome(Struct, frozen=True):
    """The answer of the login node."""

    proof: str
    """:func:`nonce_proof` of the nonce."""
    clock: float
    """The login node's time."""


class Reached(Struct, frozen=True):
    """The result of connecting to one address of the login node."""

    address: str
    trouble: str = ""
    """Why the connection failed; empty if it succeeded."""
    skew: float = 0.0
    """Seconds by which this node's clock is ahead of the login node's, with an error of at most ``bound`` (s)."""
    bound: float = 0.0


class NodeReport(Struct, frozen=True):
    """The results of the probe on one compute node."""

    node: str
    folder: str
    """Why the nonce file in FOLDER could not be read, or the report could not be written; empty if both succeeded."""
    rrl: str
    """Folder of the package rrl on the node."""
    host: Host
    torch: Torch | Unavailable
    sbatch: CommandResult | Unavailable
    """The result of ``sbatch --test-only`` on the node."""
    reached: tuple[Reached, ...]
    slurm_gpus: str
    """Slurm's numbers of the GPUs of the job (``SLURM_JOB_GPUS``)."""


def nonce_proof(nonce: str) -> str:
    """Return the answer that proves knowledge of ``nonce`` without containing it."""
    return hmac.digest(nonce.encode(), b"rrl doctor, login node", hashlib.sha256).hex()


def main(argv: Sequence[str]) -> int:
    """Probe this node; return 0 if the report was written to the folder or sent over a connection, else 1."""
    if not argv or NONCE_ENV not in os.environ:
        exit_invalid_config(f"usage: {NONCE_ENV}=... python -m rrl.cli.doctor.node_probe.main FOLDER ADDRESS...")
    signal.setitimer(signal.ITIMER_REAL, PROBE_TIMEOUT_S)  # SIGALRM ends the process even if a reader hangs
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
    reached = {address: results[f"to {address}"] for address in argv[1:]}
    folder_problem, host = results["folder"], results["host"]
    if isinstance(host, Unavailable):
        host = Host(**dict.fromkeys(Host.__struct_fields__, host))
    report = NodeReport(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        folder=folder_problem.why if isinstance(folder_problem, Unavailable) else folder_problem,
        rrl=os.path.dirname(rrl.__file__ or ""),
        host=host,
        torch=results["torch"],
        sbatch=results["sbatch"],
        reached=tuple(
            Reached(address, one.why) if isinstance(one, Unavailable) else one[1] for address, one in reached.items()
        ),
        slurm_gpus=os.environ.get("SLURM_JOB_GPUS", ""),
    )
    return _deliver(report, folder, [one[0] for one in reached.values() if not isinstance(one, Unavailable)])


def connect_login_node(address: str, nonce: str) -> tuple[socket.socket, Reached]:
    """Connect to the login node, verify that it knows the nonce, and compare the clocks. Raises OSError if it fails."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
    try:
        clock, sent = time.time(), time.monotonic()
        connection.sendall(msgspec.json.encode(Hello(nonce)) + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline(_MAX_LINE_BYTES)
        bound = (time.monotonic() - sent) / 2
        if not line:
            raise OSError("the login node closed the connection")
        welcome = msgspec.json.decode(line, type=Welcome)
        if not hmac.compare_digest(welcome.proof.encode(), nonce_proof(nonce).encode()):
            raise OSError(_FOREIGN)
    except BaseException as error:
        connection.close()
        if isinstance(error, msgspec.MsgspecError):
            raise OSError(_FOREIGN) from None
        raise
    return connection, Reached(address, skew=clock + bound - welcome.clock, bound=bound)


def _check_nonce_file(folder: Path, nonce: str) -> str:
    try:
        return (
            ""
            if (folder / NONCE_FILE).read_text() == nonce
            else f"the file {NONCE_FILE} in this folder was written for another probe"
        )
    except OSError as error:
        return error.strerror or str(error)


def _sbatch() -> CommandResult:
    options = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := _option(key))]
    argv = ["sbatch", "--test-only", "--nodes=1", "--ntasks=1", "--time=1", *options]
    return run(argv, _READ_TIMEOUT_S - 0.5, env=environment(os.environ), stdin_text="#!/bin/sh\ntrue\n")


def _option(key: str) -> str:
    """Return this job's value of the sbatch option ``key``: its ``partition``, ``account`` or ``qos``.

    ``sbatch --test-only`` then requests the same value. The value is empty if the job has none.
    """
    return os.environ.get(f"SLURM_JOB_{key.upper()}", "").replace("(null)", "")


def _deliver(report: NodeReport, folder: Path, connections: Sequence[socket.socket]) -> int:
    """Write the report into the folder, then send it over the first connection; return the exit code.

    The file is written first, because the login node measures how long it takes to become visible.
    """
    data, delivered = msgspec.json.encode(report), False
    if not report.folder:
        try:
            write_atomically(folder / REPORT, data)
            delivered = True
        except OSError as error:
            report = msgspec.structs.replace(report, folder=f"can be read but not written: {error.strerror}")
            data = msgspec.json.encode(report)
    for connection in connections[:1]:
        with contextlib.suppress(OSError):
            connection.sendall(data + b"\n")
            delivered = True
    for connection in connections:
        connection.close()
    return 0 if delivered else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
