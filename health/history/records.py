"""Records of a history folder: what runs report about nodes, one JSON object per line.

``<history>/<user>/<run>.<epoch>.jsonl`` is one file per manager of a run, because managers that append to one file over
NFS would overwrite each other. It is created with O_EXCL and mode 0644 by the user whose name the folder has. The
records belong to the file's owner, as the kernel reports it; a record that names another user or run is ignored.

A node's own checks have files of the same form, whose first line is :class:`NodeChecks` instead of :class:`RunStarted`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from ...core.types import Cause, Flag, Remedy, Verdict

SCHEMA = 2
"""Version of the format; a file of another version is rejected as a whole. Version 2 has other names of kinds and
fields than version 1."""
MAX_EVIDENCE_LINES = 5
"""Maximum number of evidence lines in one record (docs/sources.md, NVSentinel and gcm)."""
MAX_TEXT_CHARS = 300
"""Maximum number of characters of one evidence line."""
MAX_LINE_BYTES = 65536
"""Maximum size of one line in bytes, which rrl never exceeds."""
MAX_FILE_RECORDS = 200_000
"""Maximum number of records in one file. A run that reaches this limit is broken: it has reported something new each
second for two days."""
MAX_FILE_BYTES = 64 * 2**20
"""Maximum size of one file in bytes: about MAX_FILE_RECORDS records of 300 bytes, the usual size. Writers obey this
limit."""


CHECK_RUN_PREFIX = "health-check."
"""Beginning of the name that the checks of a node have in place of a run id: ``health-check.n12``."""


class EvidenceLine(Struct, frozen=True):
    """One line of evidence, with the manager's wall-clock time (s)."""

    at: float
    source: str
    text: str


class RunStarted(Struct, frozen=True, tag_field="kind", tag="run_started"):
    """First line of every file: the run that the file belongs to."""

    at: float
    run: str
    user: str
    cluster: str
    """Slurm's name of the cluster, or ``local``."""
    job: str
    """Name of the job spec."""
    epoch: int = 1
    schema: int = SCHEMA


class NodeAcquired(Struct, frozen=True, tag_field="kind", tag="node_acquired"):
    """The run acquired a node, with ``gpus`` of its GPUs."""

    at: float
    node: str
    gpus: int = 0


class NodeReleased(Struct, frozen=True, tag_field="kind", tag="node_released"):
    """The run released a node."""

    at: float
    node: str


class Checkpoint(Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """Record of a run that has nothing else to report: the run still holds its nodes.

    Without a RunEnded, the nodes count as held until the file's last record.
    """

    at: float


class FindingRecord(Struct, frozen=True, tag_field="kind", tag="finding"):
    """A finding that was raised, changed or repeated (``count``), or that has cleared (verdict OK)."""

    at: float
    node: str
    """Node that the finding is about. For a finding about a replica, it is the replica's node. Empty if the node is
    unknown, or if the finding is about several nodes."""
    detector: str
    verdict: Verdict
    cause: Cause
    remedy: Remedy
    since: float
    incarnation: str = ""
    """Incarnation (``rollout/1#2``); empty if the finding is about the node itself."""
    component: str = ""
    """Component of the node: a GPU's UUID, a port, a path."""
    proof: bool = False
    count: int = 1
    """How often this manager has recorded the finding since it was raised; 0 if an earlier manager raised it."""
    evidence: tuple[EvidenceLine, ...] = ()
    injected: bool = False
    """Whether a fault was injected on the node, so that the finding does not count against the node."""
    flags: tuple[Flag, ...] = ()
    """Flags of the finding, so that a report need not parse evidence."""


class ActionTaken(Struct, frozen=True, tag_field="kind", tag="action_taken"):
    """An action of the run on a node.

    ``action`` is ``excluded``, ``readmitted``, ``drained``, ``undrained`` or ``drain_requested``. The last means that
    the run may not drain the node and requests the drain from the administrators.
    """

    at: float
    node: str
    action: str
    reason: str = ""
    """Reason of the drain, as Slurm shows it."""
    cause: str = ""
    by: str = ""
    """User who requested the action; empty if the run itself decided it."""
    rejection: str = ""
    """Reason why the cluster did not drain the node, for ``drain_requested``."""
    evidence: tuple[str, ...] = ()


class Failed(Struct, frozen=True, tag_field="kind", tag="failed"):
    """A replica failed (``incarnation`` names it), or a node failed (``incarnation`` is empty)."""

    at: float
    node: str
    incarnation: str = ""
    stalled_replicas: tuple[str, ...] = ()
    """Replicas that stopped because of the failure, including the failed replica. A :class:`RecoveryDone` for each of
    them reports when it worked again."""
    cause: str = ""
    detector: str = ""
    remedy: str = ""
    since: float = 0.0
    """Time of the first symptom (s)."""
    proof: bool = False
    injected: bool = False
    """Whether a fault was injected on the node, so that the failure does not count against the site."""
    node_lost: bool = False
    """Whether the cluster reported the node as lost, or the node stopped responding."""
    rung: str = ""
    evidence: tuple[str, ...] = ()


class RecoveryDone(Struct, frozen=True, tag_field="kind", tag="recovery_done"):
    """A replica works again or, if ``ok`` is false, the run ended first.

    ``gpu_hours`` is the idle time of the replica's GPUs from ``since`` to ``at``.
    """

    at: float
    replica: str
    node: str
    since: float
    gpu_hours: float
    ok: bool = True


class RunEnded(Struct, frozen=True, tag_field="kind", tag="run_ended"):
    """The run has ended and holds no nodes."""

    at: float
    outcome: str
    why: str = ""


class RecordsLost(Struct, frozen=True, tag_field="kind", tag="records_lost"):
    """The loss of ``lines`` records, which could not be written because storage was full or hung."""

    at: float
    lines: int


class NodeChecks(Struct, frozen=True, tag_field="kind", tag="node_checks"):
    """First line of a file with the findings of a node's own checks (``check_records``). The file belongs to no run."""

    at: float
    node: str
    user: str
    schema: int = SCHEMA


Record = (
    RunStarted
    | NodeChecks
    | NodeAcquired
    | NodeReleased
    | Checkpoint
    | FindingRecord
    | ActionTaken
    | Failed
    | RecoveryDone
    | RunEnded
    | RecordsLost
)


class SourcedRecord(Struct, frozen=True):
    """A record with its source: the owner of its file, and the run in the file's name."""

    user: str
    run: str
    record: Record
    trusted: bool = False
    """Whether root owns the file. Root's records need no second witness."""


class _Header(Struct, frozen=True):
    """The part of a file's first line that is the same in every version."""

    schema: int | None = None


_decode_header = msgspec.json.Decoder(_Header).decode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
"""Pattern of an escaped character in a line. rrl writes printable text, in which JSON escapes only quotes and
backslashes."""
_FILE = re.compile(r"(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,200})\.(?P<epoch>[0-9]{6,18})\.jsonl")
"""Pattern of the names of history files. Users may give files any name, even with control sequences for a terminal."""


def encode_line(record: Record) -> bytes:
    """Return the record as a line of a history file."""
    return _encode(record) + b"\n"


def read_line(text: bytes) -> Record | None:
    """Return the record of a line, or None if it is torn, damaged or of an unknown kind.

    Any user can write a history file. So invalid times (not finite, negative, beyond the year 9999), invalid names, and
    characters that would move a terminal's cursor count as damage too.
    """
    text = text.strip()
    if not text or len(text) > MAX_LINE_BYTES or any(sign not in b'"\\/' for sign in _ESCAPED.findall(text)):
        return None
    try:
        if not text.decode().isprintable():
            return None
        record = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return record if _is_sane(record) else None


def file_name(run: str, epoch: int) -> str:
    """Return the name of the history file of a run's manager."""
    return f"{run}.{epoch:06}.jsonl"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """Return the run and epoch in a file's name; None if it is not the name of a history file."""
    match = _FILE.fullmatch(name)
    return (match["run"], int(match["epoch"])) if match else None


def file_schema(first_line: bytes) -> int | None:
    """Return the schema that a file's first line states; None if the line is torn, damaged or states none.

    Files of every version name their schema in the first line.
    """
    try:
        return _decode_header(first_line).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_attributable(record: Record, user: str, run: str) -> bool:
    """Return False if the record is a file's first line and names another user or run, else True.

    ``user`` is the user of the file's folder, ``run`` the run in the file's name.
    """
    if isinstance(record, NodeChecks):
        return record.user == user and run == f"{CHECK_RUN_PREFIX}{record.node}"
    return not isinstance(record, RunStarted) or (record.user == user and record.run == run)


def clipped(text: str) -> str:
    """Return the text as one line of evidence, without characters that would move a terminal's cursor."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    return plain if len(plain) <= MAX_TEXT_CHARS else plain[: MAX_TEXT_CHARS - 1] + "…"


_LATEST_S = 253_402_300_800.0
"""Start of the year 10000 (s since 1970)."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_node(name: str) -> bool:
    """Return whether this is the name of one node: neither a list of nodes nor ``ALL``, which scontrol would expand."""
    return bool(_NODE.fullmatch(name)) and name.upper() != "ALL"


def _is_sane(record: Any) -> bool:
    evidence = getattr(record, "evidence", ())
    times = (
        record.at,
        getattr(record, "since", 0.0),
        *(line.at for line in evidence if isinstance(line, EvidenceLine)),
    )
    numbers = (getattr(record, "gpu_hours", 0.0), getattr(record, "gpus", 0), getattr(record, "lines", 0))
    node = getattr(record, "node", "")
    return (
        all(0.0 <= at < _LATEST_S for at in times)
        and all(0 <= number < 1e9 for number in numbers)
        and (not node or is_node(node))
        and len(evidence) <= MAX_EVIDENCE_LINES
    )
