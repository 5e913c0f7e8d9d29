"""One small job on one compute node, with the user's consent: what is that node like, and what does it see from there?

The job is :mod:`rrl.roles.node_probe.main`, by the same interpreter path as this one. It lives 10 s, and is cancelled
if it has not begun :data:`QUEUE` s after its submission. What it leaves lies in a folder of its own under the folder of
all runs, and is removed with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from ...core.run_dir import runs_root
from ...roles.node_probe.host import Network, Unread
from ...roles.node_probe.main import LETTER, NONCE_ENV, REPORT, WITHIN, NodeReport, proof
from .collect import TRUE, slurm, would_take
from .facts import Facts, Visit
from .slurm_output import start_of

QUEUE = 60.0
"""s that the job may wait for a node; Slurm's estimate is asked first: no job is submitted that would wait longer"""
SEEN_BY = 35.0
"""s in which the node's file should be seen here: NFS keeps a folder's listing for 30 s (nfs(5), acdirmin)"""
_LOOK = 0.25
"""s between two looks into the folder"""
_ASK = 2.0
"""s between two questions to Slurm"""
_SLACK = 10.0
"""s beyond the probe's own end, for Slurm to start it and to tell that it has ended"""
_GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "?")
_LINE = 2**20
"""bytes of one line on a connection: a report has a few thousand"""
_ROUNDS = 5
"""times that the node's clock is asked for; the quickest answer counts"""
_GUESTS = 16
"""connections at a time"""
_ONE = ("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=512M", "--time=1", "--no-requeue", "--output=/dev/null")
_NO_PYTHON = 72
_SCRIPT = """\
#!/bin/sh
# rrl doctor: looks around on one node for {within:.0f} s and leaves its report.
export {nonce_env}={nonce}
if [ -d {folder} ]; then exec >{folder}/job.log 2>&1; fi
[ -x {python} ] || exit {no_python}
exec {python} -P -m rrl.roles.node_probe.main {folder} {addresses}
"""


def visit(facts: Facts) -> Visit | Unread:
    """Submit the job, wait for what it tells, leave nothing. Takes about 10 s once a node is free."""
    options = _options(facts)
    if isinstance(options, Unread):
        return options
    root = runs_root()
    made = not root.exists()
    folder = root / f".doctor-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        return Unread(f"{error.filename}: {error.strerror}: there is no folder to meet in")
    try:
        with Listener() as listener:
            return _Job(folder, listener, options).run(_addresses(facts, listener.port))
    except OSError as error:
        return Unread(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # a run was begun meanwhile
                root.rmdir()


def _options(facts: Facts) -> tuple[str, ...] | Unread:
    """With a GPU where the partition has some and one is free soon: without it the driver may hide them all."""
    base = (*_ONE, *facts.wanted.options())
    told = ""
    for options in (("--gres=gpu:1", *base), base):
        answer = would_take(options, TRUE)
        if isinstance(answer, Unread):
            return answer
        told = answer.said
        start = start_of(answer.said)
        if answer.code == 0 and (start is None or _in(start) <= QUEUE):
            return options
        if start is not None:
            told = f"no node is free soon: the job would start at {start}"
    return Unread(f"no job for it: {told}")


def _in(start: str) -> float:
    return (datetime.fromisoformat(start) - datetime.now()).total_seconds()


def _addresses(facts: Facts, port: int) -> tuple[str, ...]:
    """Every address that this host could be reached at, the one that rrl would take first."""
    network = facts.host.network
    if not isinstance(network, Network):
        return ()
    every = [one.address for one in network.interfaces]
    outside = [one for one in every if not one.startswith("127.")] or every
    return tuple(f"{one}:{port}" for one in dict.fromkeys([network.chosen, *outside]) if one)


class _Job:
    """The job, from its submission to its end."""

    def __init__(self, folder: Path, listener: Listener, options: Sequence[str]) -> None:
        self._folder = folder
        self._listener = listener
        self._options = options
        self._id = ""

    def run(self, addresses: Sequence[str]) -> Visit | Unread:
        (self._folder / LETTER).write_text(self._listener.nonce)
        script = _SCRIPT.format(
            within=WITHIN, nonce_env=NONCE_ENV, nonce=self._listener.nonce, folder=shlex.quote(str(self._folder)),
            python=shlex.quote(sys.executable), no_python=_NO_PYTHON, addresses=shlex.join(addresses),
        )  # fmt: skip
        tag = f"rrl-doctor-{secrets.token_hex(4)}"
        try:
            ended = slurm("sbatch", "--parsable", *self._options, f"--job-name={tag}", given=script)
            if ended.code:
                return Unread(f"sbatch: {ended.said}")
            self._id = ended.out.strip().partition(";")[0]
            return self._wait()
        finally:  # by its name where sbatch gave no answer: it may have landed all the same
            with contextlib.suppress(OSError):
                slurm("scancel", self._id or f"--name={tag}")

    def _wait(self) -> Visit | Unread:
        state = self._until_told()
        if isinstance(state, Unread):
            return state
        told = time.monotonic()
        while True:
            heard, waited = self._listener.report, time.monotonic() - told
            if (report := self._file()) is not None:
                return self._visit(report, waited)
            none_comes = heard.folder != "" if heard is not None else not state.endswith(" 0:0")
            if none_comes or waited > SEEN_BY:
                return Unread(self._mute(state)) if heard is None else self._visit(heard, None)
            self._listener.wait(_LOOK)

    def _until_told(self) -> str | Unread:
        """Until a report is here, or the job is over: its state then, as :meth:`_state` has it."""
        began, asked, state = time.monotonic(), -_ASK, ""
        while True:
            waited = time.monotonic() - began
            if self._listener.report is not None or self._file() is not None:
                return state
            if waited - asked >= _ASK:
                asked, state = waited, self._state()
            if state.partition(" ")[0] not in _GOING_ON:
                return state
            if waited > QUEUE + (0 if state.startswith("PENDING") else WITHIN + _SLACK):
                return Unread(f"nothing was heard of the job within {waited:.0f} s; Slurm says: {state}")
            self._listener.wait(_LOOK)

    def _file(self) -> NodeReport | None:
        """A listing first: it makes NFS ask its server again, where a lookup would believe an old "not there"."""
        try:
            if REPORT not in os.listdir(self._folder):
                return None
            return msgspec.json.decode((self._folder / REPORT).read_bytes(), type=NodeReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def _state(self) -> str:
        """``STATE Reason exit:signal``."""
        try:
            ended = slurm("scontrol", "show", "job", "-o", self._id)
        except OSError:
            return "?"
        found = [re.search(rf" {key}=(\S+)", ended.out) for key in ("JobState", "Reason", "ExitCode")]
        return " ".join(match[1] for match in found if match) if found[0] else f"? {ended.said[:200]}"

    def _mute(self, state: str) -> str:
        if state.endswith(f" {_NO_PYTHON}:0"):
            return f"{sys.executable} is not there on the node: the job ended with exit code {_NO_PYTHON}"
        try:
            said = (self._folder / "job.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            said = []
        return f"the job ended without a word ({state}){': ' + said[-1] if said else ''}"

    def _visit(self, report: NodeReport, seen: float | None) -> Visit:
        self._listener.finish()
        skew, bound = self._listener.skew or (None, 0.0)
        return Visit(report, seen, skew, bound)


class Listener:
    """Where the node dials in: any address, a free port, for as long as the job lives. Whoever does not know the nonce
    is hung up on; nothing that is heard is believed but for the report of one who does."""

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.report: NodeReport | None = None
        self.skew: tuple[float, float] | None = None
        self._change = threading.Condition()
        self._guests = threading.Semaphore(_GUESTS)
        self._busy = 0
        self._socket = socket.create_server(("", 0), backlog=_GUESTS)
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()

    def wait(self, within: float) -> None:
        """Until something was heard, or ``within`` s."""
        with self._change:
            self._change.wait(within)

    def finish(self) -> None:
        """Let a connection that is telling its report come to its end: the file may be here first."""
        with self._change:
            self._change.wait_for(lambda: self.report is not None or not self._busy, _ASK)

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            if self._guests.acquire(blocking=False):
                threading.Thread(target=self._talk, args=(line,), daemon=True).start()
            else:
                line.close()

    def _talk(self, line: socket.socket) -> None:
        try:
            with line, line.makefile("rb") as heard:
                line.settimeout(WITHIN)
                hello = msgspec.json.decode(heard.readline(200), type=dict[str, str])
                if not secrets.compare_digest(hello["nonce"], self.nonce):
                    return
                line.sendall(proof(self.nonce).encode() + b"\n")
                self._count(1)
                try:
                    self._listen(line, heard.readline)
                finally:
                    self._count(-1)
        except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
            pass  # a stranger, or a connection that the node did not keep
        finally:
            self._guests.release()

    def _listen(self, line: socket.socket, readline: Callable[[int], bytes]) -> None:
        best: tuple[float, float] | None = None
        for _ in range(_ROUNDS):
            sent, clock = time.monotonic(), time.time()
            line.sendall(b"\n")
            there = float(msgspec.json.decode(readline(_LINE))["clock"])
            took = time.monotonic() - sent
            if best is None or took / 2 < best[1]:
                best = there - (clock + took / 2), took / 2
        line.sendall(b"report\n")
        report = msgspec.json.decode(readline(_LINE), type=NodeReport)
        with self._change:
            self.report, self.skew = report, best
            self._change.notify_all()

    def _count(self, one: int) -> None:
        with self._change:
            self._busy += one
            self._change.notify_all()
