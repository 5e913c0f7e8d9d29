"""Run one small job on a compute node, with the user's consent, to read the node's properties and test its network.

The job runs :mod:`.node_probe.main` with the same interpreter path as this process. It takes 10 s, and is cancelled if
it has not begun :data:`MAX_QUEUE_S` s after its submission. Its files are in a temporary folder, which is created
within the folder of all runs and removed afterwards.
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

from ...cluster.slurm.parsing import estimated_start
from ...core.run_dir import runs_root
from .collect import TRUE_SCRIPT, run_slurm, would_take
from .facts import Facts, Visit
from .node_probe.host import Network, Unavailable
from .node_probe.main import NONCE_ENV, NONCE_FILE, PROBE_TIMEOUT_S, REPORT, NodeReport, nonce_proof

MAX_QUEUE_S = 60.0
"""Time (s) that the job may wait for a node. If Slurm estimates a longer wait, no job is submitted."""
FILE_TIMEOUT_S = 35.0
"""Time (s) for the node's file to become visible here: NFS caches a folder's listing for 30 s (nfs(5), acdirmin)."""
_POLL_INTERVAL_S = 0.25
"""Seconds between two reads of the folder."""
_SLURM_POLL_INTERVAL_S = 2.0
"""Seconds between two queries of Slurm."""
_JOB_SLACK_S = 10.0
"""Time (s), in addition to the probe's own limit, in which Slurm starts the job and reports its end."""
_ACTIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "?")
_MAX_LINE_BYTES = 2**20
"""Maximum length in bytes of a line on a connection; a report has a few thousand bytes."""
_CLOCK_SAMPLES = 5
"""Number of times that the node's clock is read. The reading with the shortest delay is used."""
_MAX_CONNECTIONS = 16
"""Maximum number of connections at a time."""
_JOB_OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--cpus-per-task=1",
    "--mem=512M",
    "--time=1",
    "--no-requeue",
    "--output=/dev/null",
    "--propagate=NONE",  # the job gets the limits of the node, as a run's steps do, and not those of this shell
)
_NO_PYTHON_EXIT_CODE = 72
_SCRIPT = """\
#!/bin/sh
# rrl doctor: checks this node for at most {within:.0f} s and writes a report.
export {nonce_env}={nonce}
if [ -d {folder} ]; then exec >{folder}/job.log 2>&1; fi
[ -x {python} ] || exit {no_python}
exec {python} -P -m rrl.cli.doctor.node_probe.main {folder} {addresses}
"""


def visit_node(facts: Facts) -> Visit | Unavailable:
    """Submit a job that probes a compute node, wait for its report, and remove the job's files.

    Takes about 10 s once a node is free. Returns Unavailable with the reason if there is no report.
    """
    options = _options(facts)
    if isinstance(options, Unavailable):
        return options
    root = runs_root()
    made = not root.exists()
    folder = root / f".doctor-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        return Unavailable(f"{error.filename}: {error.strerror}: no folder for the node's report could be created")
    try:
        with ReportListener() as listener:
            return _VisitJob(folder, listener, options).run(_addresses(facts, listener.port))
    except OSError as error:
        return Unavailable(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # a run has been created in this folder
                root.rmdir()


def _options(facts: Facts) -> tuple[str, ...] | Unavailable:
    """Return the sbatch options of a job that could start soon; Unavailable if there is none.

    A job with one GPU is preferred, since the driver may hide all GPUs from a job without GPUs.
    """
    base = (*_JOB_OPTIONS, *facts.wanted.sbatch_options())
    reason = ""
    for options in (("--gres=gpu:1", *base), base):
        answer = would_take(options, TRUE_SCRIPT)
        if isinstance(answer, Unavailable):
            return answer
        reason = answer.message
        start = estimated_start(answer.message)
        if answer.code == 0 and (start is None or _seconds_until(start) <= MAX_QUEUE_S):
            return options
        if start is not None:
            reason = f"no node is free soon: the job would start at {start}"
    return Unavailable(f"no job was submitted to check a node: {reason}")


def _seconds_until(start: str) -> float:
    return (datetime.fromisoformat(start) - datetime.now()).total_seconds()


def _addresses(facts: Facts, port: int) -> tuple[str, ...]:
    """Return every address at which this host may be reachable, first the address that rrl would use."""
    network = facts.host.network
    if not isinstance(network, Network):
        return ()
    every = [one.address for one in network.interfaces]
    outside = [one for one in every if not one.startswith("127.")] or every
    return tuple(f"{one}:{port}" for one in dict.fromkeys([network.chosen, *outside]) if one)


class _VisitJob:
    """The job on the node, from its submission to its end."""

    def __init__(self, folder: Path, listener: ReportListener, options: Sequence[str]) -> None:
        self._folder = folder
        self._listener = listener
        self._options = options
        self._id = ""

    def run(self, addresses: Sequence[str]) -> Visit | Unavailable:
        (self._folder / NONCE_FILE).write_text(self._listener.nonce)
        script = _SCRIPT.format(
            within=PROBE_TIMEOUT_S,
            nonce_env=NONCE_ENV,
            nonce=self._listener.nonce,
            folder=shlex.quote(str(self._folder)),
            python=shlex.quote(sys.executable),
            no_python=_NO_PYTHON_EXIT_CODE,
            addresses=shlex.join(addresses),
        )
        tag = f"rrl-doctor-{secrets.token_hex(4)}"
        try:
            ended = run_slurm("sbatch", "--parsable", *self._options, f"--job-name={tag}", stdin=script)
            if ended.code:
                return Unavailable(f"sbatch: {ended.message}")
            self._id = ended.out.strip().partition(";")[0]
            return self._wait_for_visit()
        finally:  # the job may exist although sbatch did not answer: cancel it by its name
            with contextlib.suppress(OSError):
                run_slurm("scancel", self._id or f"--name={tag}")

    def _wait_for_visit(self) -> Visit | Unavailable:
        state = self._wait_for_report()
        if isinstance(state, Unavailable):
            return state
        reported_at = time.monotonic()
        while True:
            received, waited = self._listener.report, time.monotonic() - reported_at
            if (report := self._read_report()) is not None:
                return self._visit(report, waited)
            no_file_expected = received.folder != "" if received is not None else not state.endswith(" 0:0")
            if no_file_expected or waited > FILE_TIMEOUT_S:
                return Unavailable(self._no_report_reason(state)) if received is None else self._visit(received, None)
            self._listener.wait(_POLL_INTERVAL_S)

    def _wait_for_report(self) -> str | Unavailable:
        """Wait until there is a report or the job has ended, and return the job's last state.

        The state has the format of :meth:`_state`. Returns Unavailable if the time limit passes first.
        """
        began, polled_at, state = time.monotonic(), -_SLURM_POLL_INTERVAL_S, ""
        while True:
            waited = time.monotonic() - began
            if self._listener.report is not None or self._read_report() is not None:
                return state
            if waited - polled_at >= _SLURM_POLL_INTERVAL_S:
                polled_at, state = waited, self._state()
            if state.partition(" ")[0] not in _ACTIVE_STATES:
                return state
            if waited > MAX_QUEUE_S + (0 if state.startswith("PENDING") else PROBE_TIMEOUT_S + _JOB_SLACK_S):
                return Unavailable(f"the job sent no report within {waited:.0f} s; its state in Slurm: {state}")
            self._listener.wait(_POLL_INTERVAL_S)

    def _read_report(self) -> NodeReport | None:
        """Read the report file of the job; return None if the file does not exist or is incomplete.

        The folder is listed first, because a listing makes NFS query its server again; a lookup may return a cached
        "not found".
        """
        try:
            if REPORT not in os.listdir(self._folder):
                return None
            return msgspec.json.decode((self._folder / REPORT).read_bytes(), type=NodeReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def _state(self) -> str:
        """Return the job's ``STATE Reason exit:signal``; a text that begins with ``?`` if Slurm gives no state."""
        try:
            ended = run_slurm("scontrol", "show", "job", "-o", self._id)
        except OSError:
            return "?"
        found = [re.search(rf" {key}=(\S+)", ended.out) for key in ("JobState", "Reason", "ExitCode")]
        return " ".join(match[1] for match in found if match) if found[0] else f"? {ended.message[:200]}"

    def _no_report_reason(self, state: str) -> str:
        if state.endswith(f" {_NO_PYTHON_EXIT_CODE}:0"):
            return f"{sys.executable} does not exist on the node: the job ended with exit code {_NO_PYTHON_EXIT_CODE}"
        try:
            output = (self._folder / "job.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            output = []
        return f"the job ended without a report ({state}){': ' + output[-1] if output else ''}"

    def _visit(self, report: NodeReport, visible_after_s: float | None) -> Visit:
        self._listener.finish()
        skew, bound = self._listener.skew or (None, 0.0)
        return Visit(report, visible_after_s, skew, bound)


class ReportListener:
    """Listens for the report of the node's job on all addresses, at a free port, while the job exists.

    A connection that does not present the nonce is closed, and its data is ignored.
    """

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.report: NodeReport | None = None
        self.skew: tuple[float, float] | None = None
        self._changed = threading.Condition()
        self._free_slots = threading.Semaphore(_MAX_CONNECTIONS)
        self._open_connections = 0
        self._socket = socket.create_server(("", 0), backlog=_MAX_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> ReportListener:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the report was received or a connection was opened or closed, for ``timeout_s`` at most."""
        with self._changed:
            self._changed.wait(timeout_s)

    def finish(self) -> None:
        """Wait until a connection that is sending its report has delivered it or is closed.

        The job also writes the report to a file, which may become visible here before the connection has delivered the
        report. Waits for ``_SLURM_POLL_INTERVAL_S`` at most.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.report is not None or not self._open_connections, _SLURM_POLL_INTERVAL_S
            )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if self._free_slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as reader:
                connection.settimeout(PROBE_TIMEOUT_S)
                hello = msgspec.json.decode(reader.readline(200), type=dict[str, str])
                if not secrets.compare_digest(hello["nonce"], self.nonce):
                    return
                connection.sendall(nonce_proof(self.nonce).encode() + b"\n")
                self._add_connections(1)
                try:
                    self._receive_report(connection, reader.readline)
                finally:
                    self._add_connections(-1)
        except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
            pass  # another program has connected, or the connection broke
        finally:
            self._free_slots.release()

    def _receive_report(self, connection: socket.socket, readline: Callable[[int], bytes]) -> None:
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_SAMPLES):
            sent, clock = time.monotonic(), time.time()
            connection.sendall(b"\n")
            node_clock = float(msgspec.json.decode(readline(_MAX_LINE_BYTES))["clock"])
            took = time.monotonic() - sent
            if best is None or took / 2 < best[1]:
                best = node_clock - (clock + took / 2), took / 2
        connection.sendall(b"report\n")
        report = msgspec.json.decode(readline(_MAX_LINE_BYTES), type=NodeReport)
        with self._changed:
            self.report, self.skew = report, best
            self._changed.notify_all()

    def _add_connections(self, change: int) -> None:
        with self._changed:
            self._open_connections += change
            self._changed.notify_all()
