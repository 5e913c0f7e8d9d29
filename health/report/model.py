"""What a report says: values with stable names, which its JSON shows as they are. Times are s since 1970."""

from __future__ import annotations

from msgspec import Struct

from ..history.rates import Lemon, Rate

VERSION = 1
"""of the names"""


class ReportLine(Struct, frozen=True):
    at: float
    source: str
    text: str


class DrainState(Struct, frozen=True):
    """As the cluster says now. ``whose``: ``rrl``, ``foreign`` or empty; ``state`` empty: it was not asked."""

    state: str = ""
    drained: bool = False
    owner: str = ""
    reason: str = ""
    by: str = ""
    booted: float = 0.0
    """s since 1970; 0: not known"""
    gpus: int | None = None
    """as Slurm has configured them; None: not known"""
    partitions: tuple[str, ...] = ()
    """that the node is in"""
    by_check: bool = False
    """root's HealthCheckProgram drained it (``rrl:health:``): the node's own record of what is wrong with it"""


class NodeReport(Struct, frozen=True):
    node: str
    verdict: str
    """now: of what still stands; WARN where it is FAIL by the records of one user alone"""
    as_of: float
    """the last sign of a run that had it"""
    cause: str
    detectors: list[str]
    evidence: list[ReportLine]
    """of what stands, else of what stood last; at most five"""
    first_seen: float | None
    last_seen: float | None
    count: int
    components: list[str]
    """GPUs, ports, paths that it is about"""
    facts: dict[str, str]
    """serial, boot id, driver, vbios where evidence names them"""
    incidents: int
    """failures of infrastructure"""
    other_failures: int
    """of software and users, met here"""
    injected: int
    gpu_hours_lost: float
    node_hours: float
    failures_per_1000_node_days: Rate
    runs: list[str]
    users: list[str]
    witnesses: list[str]
    """users whose runs say that hardware failed here; root's count alone, of others at least two are needed"""
    accused: bool
    """enough of them say so: the verdict FAIL, a remedy, a drain and the name of a lemon need it"""
    related_nodes: list[str]
    """nodes that showed the same within 10 min"""
    actions: list[ReportLine]
    """what runs did about it, the newest last"""
    action: str
    """recommended"""
    remedy: str
    drain: DrainState
    scontrol: str
    """a line to paste; empty where nothing is to be drained"""
    lemon: Lemon


class CauseShare(Struct, frozen=True):
    owner: str
    cause: str
    failures: int
    gpu_hours: float


class Day(Struct, frozen=True):
    """``at``: its beginning, UTC."""

    at: float
    node_days: float
    failures: dict[str, int]
    """by cause; of software and users together ``software``, ``user``"""


class SiteReport(Struct, frozen=True):
    since: float
    until: float
    clusters: list[str]
    nodes: int
    runs: int
    users: int
    node_days: float
    gpu_days: float
    failures: int
    """of infrastructure, injected ones left out"""
    other_failures: int
    injected: int
    failures_per_1000_node_days: Rate
    node_hours_between_failures: Rate
    gpu_hours_between_failures: Rate
    causes: list[CauseShare]
    gpu_hours_lost: float
    gpu_hours_lost_to_infra: float
    lemons: list[str]
    days: list[Day]
    correlated: list[ReportLine]
    """what runs found on many nodes at once: of no node; the five newest"""
    lines_lost: int
    """of the history itself"""


class Report(Struct, frozen=True):
    version: int
    site: SiteReport
    nodes: list[NodeReport]
    """the worst first"""
