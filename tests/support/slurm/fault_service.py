"""Injects faults that the lab's plain user requests into the lab's nodes and controller.

Requests arrive at a Unix socket in the lab's folder, which only the lab's user may open. RRL_LAB_FAULTS in the user's
environment is the path of the socket. A request is one line with a JSON object, and so is the answer:

    {"do": "crash", "node": "n3"}                  -> {"ok": true, "detail": "crash n3"}
    {"do": "cut", "node": "n3", "seconds": 5}      after 5 s, ``heal`` undoes cut or delay, ``up`` a crash
    {"do": "delay", "node": "n3", "ms": 200}
    {"do": "outage", "seconds": 5}                 slurmctld is gone for so long

The service handles requests one by one, in a process that ends with the lab. Its faults affect only this lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rrl.tests.support.slurm.lab import SlurmLab

ENV = "RRL_LAB_FAULTS"
_MAX_DURATION_S = 3600.0
"""Longest duration of a fault in s."""
_MAX_DELAY_MS = 60_000.0
"""Longest delay in ms."""
_MAX_LINE_BYTES = 4096
_CLIENT_TIMEOUT_S = 10.0
"""Seconds within which a client must send its line."""
_UNDONE_BY = {"crash": "up", "cut": "heal", "delay": "heal"}


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    do: Literal["crash", "up", "cut", "heal", "delay", "outage"]
    node: str | None = None
    seconds: float | None = None
    ms: float | None = None


class Answer(msgspec.Struct, frozen=True):
    ok: bool
    detail: str


def socket_of(lab: Path) -> Path:
    return lab / "faults"


def serve(lab: SlurmLab) -> None:
    """Start the service, whose socket is open when this returns; it ends with the lab's other processes."""
    account = pwd.getpwnam(lab.user)
    with socket.socket(socket.AF_UNIX) as listening:
        old = os.umask(0o177)
        try:
            listening.bind(str(socket_of(lab.dir)))
        finally:
            os.umask(old)
        os.chown(socket_of(lab.dir), account.pw_uid, account.pw_gid)
        listening.listen()
        service = (sys.executable, "-m", "rrl.tests.support.slurm.fault_service", str(lab.dir))
        lab.background(*service, log="fault_service.log", stdin=listening.fileno())


def request_fault(path: str | Path, **request: object) -> Answer:
    """Request a fault and wait until it is carried out. Raises OSError if no service runs."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(json.dumps(request).encode() + b"\n")
        with client.makefile("rb") as answers:
            return msgspec.json.decode(answers.readline(), type=Answer)


def inject(lab: SlurmLab, request: Request) -> str:
    """Carry out a fault, and undo it after ``seconds`` if they are given.

    Raises RuntimeError with the reason if the fault is refused.
    """
    if request.seconds is not None and not 0 < request.seconds <= _MAX_DURATION_S:
        raise RuntimeError(f"seconds must be above 0 and at most {_MAX_DURATION_S:.0f}")
    if request.do == "outage":
        if request.node is not None or request.ms is not None:
            raise RuntimeError("an outage is a fault of slurmctld and takes neither node nor ms")
        if request.seconds is None:
            raise RuntimeError("an outage needs seconds: a user cannot end it")
        with lab.controller_down():
            time.sleep(request.seconds)
        return f"outage of {request.seconds:g} s"
    if request.node not in lab.nodes:
        raise RuntimeError(f"no node {request.node} in this lab: {', '.join(lab.nodes)}")
    if (request.ms is not None) != (request.do == "delay"):
        raise RuntimeError("a delay needs ms, and no other fault takes it")
    if request.do == "delay":
        assert request.ms is not None
        if not 0 <= request.ms <= _MAX_DELAY_MS:
            raise RuntimeError(f"ms must be from 0 to {_MAX_DELAY_MS:.0f}")
        lab.delay(request.node, request.ms)
    else:
        {"crash": lab.crash, "up": lab.up, "cut": lab.cut, "heal": lab.heal}[request.do](request.node)
    return f"{request.do} {request.node}"


def main(path: Path) -> None:
    """Serve the listening socket on standard input until the lab's folder is gone."""
    from rrl.tests.support.slurm.lab import SlurmLab

    lab, alone = SlurmLab.load(path), threading.Lock()
    with socket.socket(fileno=0) as listening:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_converse, args=(lab, alone, client), daemon=True).start()


def _converse(lab: SlurmLab, alone: threading.Lock, client: socket.socket) -> None:
    client.settimeout(_CLIENT_TIMEOUT_S)
    with client, client.makefile("rwb") as lines, contextlib.suppress(OSError):  # a client may disconnect at any time
        while line := lines.readline(_MAX_LINE_BYTES):
            answer = _answer(lab, alone, line)
            lines.write(msgspec.json.encode(answer) + b"\n")
            lines.flush()


def _answer(lab: SlurmLab, alone: threading.Lock, request_line: bytes) -> Answer:
    try:
        request = msgspec.json.decode(request_line, type=Request)
        with alone:
            detail = inject(lab, request)
    except (msgspec.DecodeError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Answer(False, str(error))
    if request.seconds is not None and request.do in _UNDONE_BY:
        undo = msgspec.structs.replace(request, do=_UNDONE_BY[request.do], seconds=None, ms=None)
        timer = threading.Timer(request.seconds, lambda: _answer(lab, alone, msgspec.json.encode(undo)))
        timer.daemon = True
        timer.start()
        detail += f" for {request.seconds:g} s"
    return Answer(True, detail)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
