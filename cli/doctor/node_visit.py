"""Run one small job on a compute node, with the user's consent, to read the node's properties and test its network.

The job runs :mod:`.node_probe.main` with the same interpreter path as this process. It takes 10 s, and is cancelled if
it has not begun :data:`MAX_QUEUE_S` s after its submission. Its files are in a temporary folder, which is created
within the folder of all runs and removed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from math import inf
from pathlib import Path

import msgspec

from ...cluster.base import Refused, Unanswered
from ...cluster.slurm.commands import execute, output_of
from ...cluster.slurm.parsing import estimated_start
from ...core.run_dir import runs_root
from .collect import SLURM_TIMEOUT_S, TRUE_SCRIPT, try_job
from .facts import Facts, Visit
from .node_probe.host import Network, Unavailable
from .node_probe.main import NONCE_ENV, NONCE_FILE, PROBE_TIMEOUT_S, REPORT, Hello, NodeReport, Welcome, nonce_proof

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
_MAX_THREADS = 32
"""Number of threads of this process above which no further connection is served."""
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
    root = runs_root()
    made = not root.exists()
    folder = root / f".doctor-{secrets.token_hex(4)}"
    try:
        options = _options(facts)
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        with ReportListener() as listener:
            (folder / NONCE_FILE).write_text(listener.nonce)
            return _run_job(folder, listener, options, _addresses(facts, listener.port))
    except OSError as error:
        return Unavailable(
            f"{error.filename or folder}: {error.strerror or error}: no report of a node could be received"
        )
    except (NoNode, Refused, Unanswered) as error:
        return Unavailable(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # a run has been created in this folder
                root.rmdir()


class NoNode(Exception):
    """No node could be visited; the text says why."""


def _options(facts: Facts) -> tuple[str, ...]:
    """Return the sbatch options of a job that could start soon. Raises NoNode if there is none.

    A job with one GPU is preferred, since the driver may hide all GPUs from a job without GPUs.
    """
    base = (*_JOB_OPTIONS, *facts.wanted.arguments())
    reason = ""
    for options in (("--gres=gpu:1", *base), base):
        answer = try_job(TRUE_SCRIPT, *options)
        reason = answer.message
        start = estimated_start(answer.message)
        if answer.code == 0 and (start is None or _seconds_until(start) <= MAX_QUEUE_S):
            return options
        if start is not None:
            reason = f"no node is free soon: the job would start at {start}"
    raise NoNode(f"no job was submitted to check a node: {reason}")


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


def _run_job(folder: Path, listener: ReportListener, options: Sequence[str], addresses: Sequence[str]) -> Visit:
    """Submit the job, wait for its report, and cancel it. Raises NoNode, Refused or Unanswered without a report."""
    script = _SCRIPT.format(
        within=PROBE_TIMEOUT_S,
        nonce_env=NONCE_ENV,
        nonce=listener.nonce,
        folder=shlex.quote(str(folder)),
        python=shlex.quote(sys.executable),
        no_python=_NO_PYTHON_EXIT_CODE,
        addresses=shlex.join(addresses),
    )
    tag = f"rrl-doctor-{secrets.token_hex(4)}"
    job = f"--name={tag}"  # the job may exist although sbatch did not answer: it is then cancelled by its name
    try:
        argv = ("sbatch", "--parsable", *options, f"--job-name={tag}")
        job = asyncio.run(output_of(argv, SLURM_TIMEOUT_S, script)).strip().partition(";")[0]
        return _wait(folder, listener, job)
    finally:
        with contextlib.suppress(Refused, Unanswered):
            asyncio.run(execute(("scancel", job), SLURM_TIMEOUT_S))


def _wait(folder: Path, listener: ReportListener, job: str) -> Visit:
    """Wait for the report of the job, which also arrives as a file. Raises NoNode if there is none in time."""
    began, polled_at, done_at, state = time.monotonic(), -inf, None, ""
    while True:
        now, received = time.monotonic(), listener.report
        if done_at is None and now - polled_at >= _SLURM_POLL_INTERVAL_S:
            polled_at, state = now, _state(job)
        if done_at is None and (received is not None or state.partition(" ")[0] not in _ACTIVE_STATES):
            done_at = now
        if (report := _read_report(folder)) is not None:
            return Visit(report, 0.0 if done_at is None else now - done_at)
        if done_at is not None:
            no_file_expected = received.folder != "" if received is not None else not state.endswith(" 0:0")
            if no_file_expected or now - done_at > FILE_TIMEOUT_S:
                if received is not None:
                    return Visit(received, None)
                raise NoNode(_no_report_reason(folder, state))
        elif now - began > MAX_QUEUE_S + (0 if state.startswith("PENDING") else PROBE_TIMEOUT_S + _JOB_SLACK_S):
            raise NoNode(f"the job sent no report within {now - began:.0f} s; its state in Slurm: {state}")
        time.sleep(_POLL_INTERVAL_S)


def _read_report(folder: Path) -> NodeReport | None:
    """Read the report file of the job; return None if the file does not exist or is incomplete.

    The folder is listed first, because a listing makes NFS query its server again; a lookup may return a cached "not
    found".
    """
    try:
        if REPORT not in os.listdir(folder):
            return None
        return msgspec.json.decode((folder / REPORT).read_bytes(), type=NodeReport)
    except (OSError, msgspec.MsgspecError):
        return None


def _state(job: str) -> str:
    """Return the job's ``STATE Reason exit:signal``; a text that begins with ``?`` if Slurm gives no state."""
    try:
        text = asyncio.run(output_of(("scontrol", "show", "job", "-o", job), SLURM_TIMEOUT_S))
    except (Refused, Unanswered) as error:
        return f"? {error}"
    found = [re.search(rf" {key}=(\S+)", text) for key in ("JobState", "Reason", "ExitCode")]
    return " ".join(match[1] for match in found if match) or "?"


def _no_report_reason(folder: Path, state: str) -> str:
    if state.endswith(f" {_NO_PYTHON_EXIT_CODE}:0"):
        return f"{sys.executable} does not exist on the node: the job ended with exit code {_NO_PYTHON_EXIT_CODE}"
    try:
        output = (folder / "job.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        output = []
    return f"the job ended without a report ({state}){': ' + output[-1] if output else ''}"


class ReportListener(socketserver.ThreadingTCPServer):
    """Listens for the report of the node's job on all addresses, at a free port, while the job exists.

    A connection that does not present the nonce is closed, and its data is ignored.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.report: NodeReport | None = None
        super().__init__(("", 0), _ReportHandler)
        self.port = int(self.server_address[1])

    def __enter__(self) -> ReportListener:
        threading.Thread(target=self.serve_forever, args=(_POLL_INTERVAL_S,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, request: object, client_address: object) -> bool:
        """Return whether another connection may be served."""
        return threading.active_count() < _MAX_THREADS


class _ReportHandler(socketserver.StreamRequestHandler):
    timeout = PROBE_TIMEOUT_S
    server: ReportListener

    def handle(self) -> None:
        # an error means that another program has connected, or that the connection broke
        with contextlib.suppress(OSError, TypeError, msgspec.MsgspecError):
            hello = msgspec.json.decode(self.rfile.readline(200), type=Hello)
            if secrets.compare_digest(hello.nonce, self.server.nonce):
                welcome = Welcome(nonce_proof(self.server.nonce), time.time())
                self.wfile.write(msgspec.json.encode(welcome) + b"\n")
                self.server.report = msgspec.json.decode(self.rfile.readline(_MAX_LINE_BYTES), type=NodeReport)
