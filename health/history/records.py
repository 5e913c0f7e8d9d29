"""What runs leave behind about nodes: the records of a history folder, one JSON object a line, and who is believed.

``<history>/<user>/<run>.<epoch>.jsonl``: a file for each manager of a run, because several that append to one file over
NFS would write over each other; created O_EXCL, 0644, by the user that the folder is named after. The owner of a file,
as the kernel knows it, is the user whose records these are: what a file says of another user or run is not believed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from ...core.types import Cause, Flag, Remedy, Verdict

SCHEMA = 1
MAX_EVIDENCE_LINES = 5
"""lines that a record keeps: what a report should carry (docs/sources.md, NVSentinel and gcm)"""
MAX_TEXT_CHARS = 300
"""characters of one of them"""
MAX_LINE_BYTES = 65536
"""bytes; a longer line is none of ours"""
MAX_FILE_RECORDS = 200_000
"""records of one file: a run that finds something new each second for two days is broken itself"""
MAX_FILE_BYTES = 64 * 2**20
"""bytes of one file: MAX_FILE_RECORDS records of the 300 bytes that most of them have; the writer stops there too"""


class EvidenceLine(Struct, frozen=True):
    """One line of evidence. ``at``: wall clock of the manager (s)."""

    at: float
    source: str
    text: str


class RunStarted(Struct, frozen=True, tag_field="kind", tag="run_started"):
    """First line of every file: whose it is."""

    at: float
    run: str
    user: str
    cluster: str
    """Slurm's name of it, or ``local``"""
    job: str
    """the job spec's name"""
    epoch: int = 1
    schema: int = SCHEMA


class NodeAcquired(Struct, frozen=True, tag_field="kind", tag="node_acquired"):
    """The run has this node from now on, with so many GPUs of it."""

    at: float
    node: str
    gpus: int = 0


class NodeReleased(Struct, frozen=True, tag_field="kind", tag="node_released"):
    at: float
    node: str


class Checkpoint(Struct, frozen=True, tag_field="kind", tag="checkpoint"):
    """The run still has what it had: a run that is cut off counts to its last line."""

    at: float


class FindingRecord(Struct, frozen=True, tag_field="kind", tag="finding"):
    """A detector concludes something else than before, or the same again (``count``). OK: it no longer does."""

    at: float
    node: str
    """where, also of what is about a replica; empty: not known"""
    detector: str
    verdict: Verdict
    cause: Cause
    remedy: Remedy
    since: float
    incarnation: str = ""
    """``rollout/1#2``; empty: it is about the node itself"""
    component: str = ""
    """of the node: a GPU's UUID, a port, a path"""
    proof: bool = False
    count: int = 1
    """how often this manager found it since it began to stand; 0: it stands since an earlier one"""
    evidence: tuple[EvidenceLine, ...] = ()
    injected: bool = False
    """a fault was injected there: it says nothing about the node"""
    flags: tuple[Flag, ...] = ()
    """of the finding, so that a report need not read its evidence"""


class ActionTaken(Struct, frozen=True, tag_field="kind", tag="action_taken"):
    """What the run did about a node: ``excluded``, ``readmitted``, ``drained``, ``undrained``, or ``asked``: it may not
    drain the node, and asks the administrators to."""

    at: float
    node: str
    action: str
    reason: str = ""
    """of the drain, as Slurm shows it"""
    cause: str = ""
    by: str = ""
    """the person who wanted it; empty: the run itself"""
    rejection: str = ""
    """``asked``: why the cluster did not drain it"""
    evidence: tuple[str, ...] = ()


class Failed(Struct, frozen=True, tag_field="kind", tag="failed"):
    """A replica was given up (``who``: its life), or a node (``who`` is empty)."""

    at: float
    node: str
    incarnation: str = ""
    stalled_replicas: tuple[str, ...] = ()
    """the replicas that stood still for it, itself included: :class:`Mended` says until when"""
    cause: str = ""
    detector: str = ""
    remedy: str = ""
    since: float = 0.0
    """its first trace"""
    proof: bool = False
    injected: bool = False
    """a fault was injected there: it says nothing about the site"""
    node_lost: bool = False
    """the cluster itself gave the node up, or it fell silent"""
    rung: str = ""
    evidence: tuple[str, ...] = ()


class RecoveryDone(Struct, frozen=True, tag_field="kind", tag="recovery_done"):
    """A replica works again, or never will (``ok`` is false: the run ends). ``gpu_hours``: of its GPUs, idle since."""

    at: float
    replica: str
    node: str
    since: float
    gpu_hours: float
    ok: bool = True


class RunEnded(Struct, frozen=True, tag_field="kind", tag="run_ended"):
    """The run has ended; it holds nothing any more."""

    at: float
    outcome: str
    why: str = ""


class RecordsLost(Struct, frozen=True, tag_field="kind", tag="records_lost"):
    """So many lines could not be written here: storage was full, or hung."""

    at: float
    lines: int


Record = (
    RunStarted
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
    """A record, and whose it is: the owner of its file, and the run that the file is named after."""

    user: str
    run: str
    record: Record
    trusted: bool = False
    """the file belongs to root: an administrator's own run, which needs no second witness"""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
"""what we write is printable: JSON escapes quotes and backslashes of it, and nothing else"""
_FILE = re.compile(r"(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,200})\.(?P<epoch>[0-9]{6,18})\.jsonl")
"""runs are called so; anybody may call a file anything, a terminal's commands included"""


def encode_line(record: Record) -> bytes:
    return _encode(record) + b"\n"


def read_line(text: bytes) -> Record | None:
    """None where it is torn, damaged, or of a kind that this version does not know. Numbers that are no times (not
    finite, negative, beyond 9999), names that are none, and signs that would move a terminal's cursor count as damaged:
    the file is anybody's."""
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
    return f"{run}.{epoch:06}.jsonl"


def parse_file_name(name: str) -> tuple[str, int] | None:
    """Run and epoch that a file's name says; None: it is no history."""
    match = _FILE.fullmatch(name)
    return (match["run"], int(match["epoch"])) if match else None


def is_attributable(record: Record, user: str, run: str) -> bool:
    """What is said in somebody else's name is not."""
    return not isinstance(record, RunStarted) or (record.user == user and record.run == run)


def clipped(text: str) -> str:
    """One line of evidence, without what would move a terminal's cursor."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    return plain if len(plain) <= MAX_TEXT_CHARS else plain[: MAX_TEXT_CHARS - 1] + "…"


_LATEST_S = 253_402_300_800.0
"""s: the year 10000"""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_node(name: str) -> bool:
    """One node's name as Slurm writes it: neither a list of several nor ``ALL``, which scontrol would take whole."""
    return bool(_NODE.fullmatch(name)) and name.upper() != "ALL"


def _is_sane(record: Any) -> bool:
    times = (record.at, getattr(record, "since", 0.0), *(said.at for said in getattr(record, "evidence", ())
                                                         if isinstance(said, EvidenceLine)))  # fmt: skip
    numbers = (getattr(record, "gpu_hours", 0.0), getattr(record, "gpus", 0), getattr(record, "lines", 0))
    node = getattr(record, "node", "")
    return (
        all(0.0 <= at < _LATEST_S for at in times)
        and all(0 <= number < 1e9 for number in numbers)
        and (not node or is_node(node))
        and len(getattr(record, "evidence", ())) <= MAX_EVIDENCE_LINES
    )
