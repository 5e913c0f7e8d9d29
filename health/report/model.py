"""The values of a report. Its JSON has the same names. Times are s since 1970."""

from __future__ import annotations

from msgspec import Struct

from ..history.rates import Lemon, Rate

VERSION = 2
"""Version of the names in the JSON. New names in version 2: ``components``, ``related_nodes``, ``drain.owner``,
``first_reported_at``, ``last_reported_at``, ``site.correlated``."""


class ReportLine(Struct, frozen=True):
    """One line of evidence, or one action."""

    at: float
    source: str
    text: str


class DrainState(Struct, frozen=True):
    """The present state of a node in the cluster.

    ``owner`` is ``rrl``, ``foreign`` or empty; an empty ``state`` means that the cluster was not queried.
    """

    state: str = ""
    drained: bool = False
    owner: str = ""
    reason: str = ""
    by: str = ""
    booted: float = 0.0
    """Time of the boot (s since 1970); 0 if it is unknown."""
    gpus: int | None = None
    """Number of GPUs in Slurm's configuration; None if it is unknown."""
    partitions: tuple[str, ...] = ()
    """Partitions that contain the node."""
    by_check: bool = False
    """Whether one of the site's hooks drained the node (``rrl:health:``). Such a drain counts as the node's own
    record."""


class NodeReport(Struct, frozen=True):
    """The part of the report about one node."""

    node: str
    verdict: str
    """Verdict from the open findings; WARN instead of FAIL if only the records of one user support a FAIL."""
    as_of: float
    """Time of the last record of a run that held the node."""
    cause: str
    detectors: list[str]
    evidence: list[ReportLine]
    """At most five lines of evidence of the open findings or, if none is open, of the last finding."""
    first_reported_at: float | None
    """Time of the first finding or failure in the window (s); None if there is none."""
    last_reported_at: float | None
    """Time of the last finding or failure in the window (s); None if there is none."""
    count: int
    components: list[str]
    """GPUs, ports or paths that the findings name."""
    facts: dict[str, str]
    """Serial number, boot id, driver and VBIOS, if evidence names them."""
    incidents: int
    """Number of failures of infrastructure."""
    other_failures: int
    """Number of failures of software and users on this node."""
    injected: int
    gpu_hours_lost: float
    node_hours: float
    failures_per_1000_node_days: Rate
    runs: list[str]
    users: list[str]
    witnesses: list[str]
    """Users whose runs report failed hardware on this node. Two users, or root alone, suffice to accuse the node."""
    accused: bool
    """Whether there are enough witnesses for the verdict FAIL, a remedy or a drain, and for calling the node a
    lemon."""
    related_nodes: list[str]
    """Other nodes whose hardware failed for the same cause within 10 min of this node's failure."""
    actions: list[ReportLine]
    """Actions of runs on the node, newest last."""
    action: str
    """Recommended action."""
    remedy: str
    drain: DrainState
    scontrol: str
    """Command to drain the node; empty if it need not be drained."""
    lemon: Lemon


class CauseShare(Struct, frozen=True):
    """Number and cost of the failures that have one cause and one party at fault."""

    owner: str
    cause: str
    failures: int
    gpu_hours: float


class Day(Struct, frozen=True):
    """Figures of one day, which begins at ``at`` (UTC)."""

    at: float
    node_days: float
    failures: dict[str, int]
    """Number of failures by cause. Failures of software and users are counted as ``software`` and ``user``."""


class SiteReport(Struct, frozen=True):
    """Figures of all nodes together."""

    since: float
    until: float
    clusters: list[str]
    nodes: int
    runs: int
    users: int
    node_days: float
    gpu_days: float
    failures: int
    """Number of failures of infrastructure, without injected failures."""
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
    """The five newest findings on many nodes at the same time, which count against no node."""
    lines_lost: int
    """Number of lines that runs could not write into their histories."""


class Report(Struct, frozen=True):
    """The whole report."""

    version: int
    site: SiteReport
    nodes: list[NodeReport]
    """Nodes, the worst first."""
