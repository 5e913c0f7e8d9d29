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
from ...core.text import refuse
from .host import Ended, Host, Torch, Unread, ask, command, read_host, read_torch

WITHIN = 10.0
"""s that the probe lives, all in all"""
_READ = 7.0
"""s for its readers; what is not there then is unread, and the report is written"""
_CONNECT = 2.0
"""s for a connection to the login node: a firewall that drops packets never answers"""
NONCE_ENV = "RRL_PROBE_NONCE"
LETTER = "letter"
REPORT = "report.json"
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF", "LD_LIBRARY_PATH")
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
    torch: Torch | Unread
    sbatch: Ended | Unread
    reached: tuple[Reached, ...]
    slurm_gpus: str
    """``SLURM_JOB_GPUS``: what Slurm says that it gave to the job"""


def proof(nonce: str) -> str:
    """What only the one who made ``nonce``, or was given it, can answer."""
    return hmac.digest(nonce.encode(), b"rrl doctor, login node", hashlib.sha256).hex()


def main(argv: Sequence[str]) -> int:
    """0 when the report reached the login node one way or the other as far as can be told from here, else 1."""
    if not argv or NONCE_ENV not in os.environ:
        refuse(f"usage: {NONCE_ENV}=... python -m rrl.roles.node_probe.main FOLDER ADDRESS...")
    signal.setitimer(signal.ITIMER_REAL, WITHIN)  # its default action ends us, whatever hangs
    folder, nonce = Path(argv[0]), os.environ[NONCE_ENV]
    told = ask(
        {
            "host": lambda: read_host(_READ - 0.5),
            "torch": lambda: read_torch(_READ - 0.5),
            "sbatch": _sbatch,
            "folder": lambda: _read_letter(folder, nonce),
            **{f"to {address}": partial(dial, address, nonce) for address in argv[1:]},
        },
        _READ,
    )
    lines: dict[str, socket.socket | Unread] = {address: told[f"to {address}"] for address in argv[1:]}
    read, host = told["folder"], told["host"]
    if isinstance(host, Unread):
        host = Host(**dict.fromkeys(Host.__struct_fields__, host))
    report = NodeReport(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        folder=read.why if isinstance(read, Unread) else read, rrl=os.path.dirname(rrl.__file__ or ""),
        host=host, torch=told["torch"], sbatch=told["sbatch"],
        reached=tuple(Reached(at, line.why if isinstance(line, Unread) else "") for at, line in lines.items()),
        slurm_gpus=os.environ.get("SLURM_JOB_GPUS", ""),
    )  # fmt: skip
    return _deliver(report, folder, [line for line in lines.values() if not isinstance(line, Unread)])


def dial(address: str, nonce: str) -> socket.socket:
    """A connection to the login node, which has proven that it is no other. Raises OSError."""
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), _CONNECT)
    try:
        _say(line, {"nonce": nonce, "at": address})
        answer = _hear(line)
        if not hmac.compare_digest(answer.strip().decode(errors="replace"), proof(nonce)):
            raise OSError("somebody else answers there")
    except BaseException:
        line.close()
        raise
    return line


def _read_letter(folder: Path, nonce: str) -> str:
    try:
        return "" if (folder / LETTER).read_text() == nonce else "the letter in it is another one"
    except OSError as error:
        return error.strerror or str(error)


def _sbatch() -> Ended:
    env = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"LC_ALL": "C"}
    options = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := _option(key))]
    argv = ["sbatch", "--test-only", "--nodes=1", "--ntasks=1", "--time=1", *options]
    return command(argv, _READ - 0.5, env, "#!/bin/sh\ntrue\n")


def _option(key: str) -> str:
    """What this job was submitted with: a job from here must be able to ask for the same."""
    return os.environ.get(f"SLURM_JOB_{key.upper()}", "").replace("(null)", "")


def _deliver(report: NodeReport, folder: Path, lines: Sequence[socket.socket]) -> int:
    """The file first: it shows how long the login node takes to see it. Then the connection, if there is one."""
    data, delivered = msgspec.json.encode(report), False
    if not report.folder:
        try:
            write_atomically(folder / REPORT, data)
            delivered = True
        except OSError as error:
            report = msgspec.structs.replace(report, folder=f"can be read but not written: {error.strerror}")
            data = msgspec.json.encode(report)
    for spare in lines[1:]:
        spare.close()
    for line in lines[:1]:
        with contextlib.suppress(OSError):
            while _hear(line) == b"\n":
                _say(line, {"clock": time.time()})
            line.sendall(data + b"\n")
            delivered = True
    return 0 if delivered else 1


def _say(line: socket.socket, what: dict[str, Any]) -> None:
    line.sendall(msgspec.json.encode(what) + b"\n")


def _hear(line: socket.socket) -> bytes:
    """One line with its end; raises OSError when there is none."""
    heard = b""
    while not heard.endswith(b"\n"):
        piece = line.recv(1)
        if not piece or len(heard) > 200:
            raise OSError("the login node hung up")
        heard += piece
    return heard


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
