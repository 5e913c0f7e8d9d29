"""Metrics of one check of a node, as a file of node_exporter's textfile collector.

The exporter reads all files ``*.prom`` of a folder at each scrape. A file is replaced atomically, so that no scrape
reads half of the file. The names are listed in docs/hooks.md, alerts are in docs/alerts.yml, and a dashboard is in
docs/grafana-nodes.json.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core.types import Finding, NodeName, Verdict
from .checks.xid_events import XidEvent

MAX_FINDING_SERIES = 200
"""Maximum number of findings with a time series of their own. If there are more, findings with FAIL have priority over
findings with WARN. A node has at most some dozens of findings."""
FILE_MODE = 0o644
"""Mode of the file, which node_exporter reads as another user."""


class NodeCheckResult(Struct, frozen=True):
    """The result of one check of a node."""

    node: NodeName
    verdict: Verdict
    findings: Sequence[Finding]
    xids: Sequence[XidEvent]
    """Xids of the last day."""
    ended_at: float
    """Time of the end of the check (s since 1970)."""
    duration_s: float
    drained_by_hook: bool | None
    """Whether a drain by the hooks is in effect; None if this is unknown."""


def metrics(result: NodeCheckResult) -> Iterator[Metric]:
    """Yield the metrics of a check, without I/O."""
    node = result.node
    verdicts = GaugeMetricFamily(
        "rrl_node_check_verdict", "1 for the verdict on the node, 0 for the other verdicts.", labels=("node", "verdict")
    )
    for verdict in Verdict:
        verdicts.add_metric((node, verdict.value), verdict is result.verdict)
    yield verdicts
    yield _gauge("rrl_node_check_timestamp_seconds", "End of the last check (s since 1970).", node, result.ended_at)
    yield _gauge("rrl_node_check_duration_seconds", "Duration of the last check (s).", node, result.duration_s)
    yield _counted(
        "rrl_node_checks",
        "Results of the checks, by verdict.",
        node,
        ("verdict",),
        ((finding.verdict.value,) for finding in result.findings),
    )
    standing = [one for verdict in (Verdict.FAIL, Verdict.WARN) for one in result.findings if one.verdict is verdict]
    yield _counted(
        "rrl_node_findings",
        "Problems of the node.",
        node,
        ("detector", "verdict", "cause", "remedy", "component"),
        (
            (one.detector, one.verdict.value, one.cause.value, one.remedy.value, one.component)
            for one in standing[:MAX_FINDING_SERIES]
        ),
    )
    yield _counted(
        "rrl_node_xids",
        "Xids of the last day, by GPU and code.",
        node,
        ("gpu", "code"),
        ((one.gpu, str(one.code)) for one in result.xids),
    )
    if result.drained_by_hook is not None:
        yield _gauge(
            "rrl_node_drained_by_hook",
            "1 if the site's hooks have drained the node, else 0.",
            node,
            result.drained_by_hook,
        )


def write_metrics(path: Path, result: NodeCheckResult) -> None:
    """Replace the file ``path`` by the metrics of a check. Raises OSError if it cannot be written.

    The folder may belong to the exporter's user, while this process may run as root. So the temporary file is always
    created anew, and no link in the folder is followed.
    """
    registry = CollectorRegistry()
    registry.register(_Fixed(list(metrics(result))))
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, FILE_MODE)  # the exporter must be able to read the file under any umask
            file.write(generate_latest(registry))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, text: str, node: NodeName, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("node",))
    family.add_metric((node,), value)
    return family


def _counted(name: str, text: str, node: NodeName, labels: Sequence[str], keys: Iterable[Sequence[str]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("node", *labels))
    for key, count in Counter(map(tuple, keys)).items():
        family.add_metric((node, *key), count)
    return family
