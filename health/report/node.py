"""The report of one node: open findings, their cost, and the recommended action. The module is pure."""

from __future__ import annotations

import re
import shlex
from math import inf

from ...core.drains import RUN_PREFIX, DrainOwner, drain_owner
from ...core.types import Cause, Flag, Remedy, Verdict
from ..history import rates
from ..history import rates as lemons
from ..history.incidents import HARDWARE_CAUSES, INFRA, Incident, RaisedFinding, RunHistory
from ..history.rates import DAY_S
from ..history.records import ActionTaken, clipped
from .corroboration import Signal, Witnesses, accused_by, confirmed, score_by_users, witnesses_of
from .index import RecordIndex
from .model import DrainState, NodeReport, ReportLine

MAX_EVIDENCE_LINES = 5
RECOVERED_AFTER_S = 3600.0
"""Seconds after which a finding that was never cleared counts as past, if other runs have held the node for this time
without the same finding."""
ADVICE = {
    Remedy.NONE: "watch",
    Remedy.RESTART: "nothing: a restart of the application is enough",
    Remedy.EXCLUDE: "run no jobs on it until it has been examined",
    Remedy.RESET_GPU: "drain it and reset its GPU (nvidia-smi --gpu-reset)",
    Remedy.REBOOT: "drain it and reboot it",
    Remedy.DRAIN: "drain it",
    Remedy.SUPPORT: "drain it and run the vendor's field diagnostics",
}
_SEVERITY = [Remedy.NONE, Remedy.RESTART, Remedy.EXCLUDE, Remedy.RESET_GPU, Remedy.REBOOT, Remedy.DRAIN, Remedy.SUPPORT]
_FACT = re.compile(
    r"\b(serial|boot[ _]id|driver|vbios|uuid)(?:\s+(?:is\s+)?|\s*[=:]\s*)([A-Za-z0-9][\w.\-]*\d[\w.\-]*)", re.IGNORECASE
)
_GPU = re.compile(r"\bGPU-[0-9a-fA-F-]{8,}")


def node_report(index: RecordIndex, name: str, drain: DrainState) -> NodeReport:
    """Return the report of one node."""
    incidents = [incident for incident in index.incidents_of.get(name, []) if incident.at >= index.since]
    infra = [incident for incident in incidents if incident.owner == INFRA and not incident.injected]
    findings = [
        raised
        for raised in index.findings.get(name, [])
        if raised.finding.at >= index.since or raised.until >= index.since
    ]
    standing = [raised for raised in findings if _is_open(index, name, raised)]
    shown = standing or findings[-1:]
    acts = [(history, act) for history, act in index.actions.get(name, []) if act.at >= index.since]
    held_s = index.held_s(name, index.since)
    by_cause = witnesses_of(findings)
    accusing = [raised for raised in standing if accused_by(raised, by_cause, drain.by_check)]
    accusers = {user for raised in accusing for user in accused_by(raised, by_cause, drain.by_check)}
    remedy = _remedy(accusing, infra)
    lemon = _lemon(index, name, drain.by_check)
    verdict = _verdict(standing, accusing)
    witnesses = (
        accusers
        | {raised.user for raised in findings if raised.critical}
        | {user for incident in infra for user in incident.witnesses}
    )
    return NodeReport(
        node=name,
        verdict=verdict,
        as_of=_as_of(index, name),
        cause=_cause(shown, infra),
        detectors=sorted({raised.finding.detector for raised in shown}),
        evidence=_evidence(shown, findings, infra),
        first_reported_at=min(
            [*(raised.at for raised in findings), *(incident.at for incident in infra)], default=None
        ),
        last_reported_at=max(
            [*(_last_reported_at(raised) for raised in findings), *(incident.at for incident in infra)], default=None
        ),
        count=sum(raised.finding.count for raised in findings),
        components=sorted({raised.finding.component for raised in findings if raised.finding.component}),
        facts=_facts(findings),
        incidents=len(infra),
        other_failures=sum(incident.owner != INFRA and not incident.injected for incident in incidents),
        injected=sum(incident.injected for incident in incidents),
        gpu_hours_lost=round(sum(incident.gpu_hours for incident in incidents if not incident.injected), 3),
        node_hours=round(held_s / 3600, 3),
        failures_per_1000_node_days=rates.rate_per(len(infra), held_s / DAY_S, 1000.0),
        runs=sorted({run for incident in incidents for run in incident.runs} | {raised.run for raised in findings}),
        users=sorted(
            {user for incident in incidents for user in incident.users} | {raised.user for raised in findings}
        ),
        witnesses=sorted(witnesses),
        accused=bool(accusing) or lemon.lemon,
        related_nodes=sorted(
            {node for incident in infra for node in incident.related_nodes} | _related_nodes(index, name, findings)
        ),
        actions=[_action(history, act) for history, act in acts][-MAX_EVIDENCE_LINES:],
        action=_advice(
            verdict, remedy, lemon, drain, sorted({raised.user for raised in standing}) if not accusing else []
        ),
        remedy=remedy.value,
        drain=drain,
        scontrol=_scontrol(name, verdict, lemon, drain, accusing or shown, acts),
        lemon=lemon,
    )


def _is_open(index: RecordIndex, node: str, raised: RaisedFinding) -> bool:
    """Return whether the finding is open.

    An open finding was never cleared, and no later finding of the same detector replaces it. It is no longer open once
    other runs have held the node for ``RECOVERED_AFTER_S`` after the finding's run last observed the node.
    """
    if raised.until < inf:
        return False
    after = index.held_by_others_s(node, (raised.user, raised.run), raised.observed_until)
    same = any(
        other.finding.detector == raised.finding.detector and other.at > raised.at for other in index.findings[node]
    )
    return after < RECOVERED_AFTER_S and not same


def _verdict(standing: list[RaisedFinding], accusing: list[RaisedFinding]) -> str:
    """Return FAIL if evidence of a failure accuses the node, else WARN if any finding is open, else OK."""
    if any(raised.finding.verdict is Verdict.FAIL for raised in accusing):
        return Verdict.FAIL.value
    return Verdict.WARN.value if standing else Verdict.OK.value


def _as_of(index: RecordIndex, node: str) -> float:
    ends = [min(end, index.now) for (_, end), _ in index.spans.get(node, ())]
    return max([*ends, *(raised.finding.at for raised in index.findings.get(node, ()))], default=0.0)


def _last_reported_at(raised: RaisedFinding) -> float:
    """Return the time (s) at which the finding was last reported or, if it has cleared, at which it cleared."""
    return raised.finding.at if raised.until == inf else raised.until


def _cause(shown: list[RaisedFinding], infra: list[Incident]) -> str:
    worst = sorted(shown, key=lambda raised: (raised.finding.verdict is not Verdict.FAIL, not raised.finding.proof))
    return worst[0].finding.cause.value if worst else infra[-1].cause if infra else ""


def _evidence(shown: list[RaisedFinding], findings: list[RaisedFinding], infra: list[Incident]) -> list[ReportLine]:
    """Return at most five lines of evidence, by time.

    The first line of each open finding has priority, then the other lines of the open findings, then the lines of
    earlier findings. If no finding has evidence, the evidence of failures of infrastructure is returned.
    """
    ordered = [*shown, *(raised for raised in reversed(findings) if raised not in shown)]
    first = [_report_line(raised, 0) for raised in shown if raised.finding.evidence]
    rest = [_report_line(raised, i) for raised in ordered for i in range(len(raised.finding.evidence))]
    lost = (
        [ReportLine(incident.at, "run", text) for incident in infra for text in incident.evidence] if not rest else []
    )
    return sorted(list(dict.fromkeys((*first, *rest, *lost)))[:MAX_EVIDENCE_LINES], key=lambda loss: loss.at)


def _report_line(raised: RaisedFinding, i: int) -> ReportLine:
    evidence_line = raised.finding.evidence[i]
    return ReportLine(evidence_line.at, raised.finding.detector, evidence_line.text)


def _facts(findings: list[RaisedFinding]) -> dict[str, str]:
    """Return the newest value of each fact in the evidence: serial number, boot id, driver, VBIOS and UUID."""
    facts: dict[str, str] = {}
    for raised in findings:
        if raised.finding.component.startswith("GPU-"):
            facts["uuid"] = raised.finding.component
        for evidence_line in raised.finding.evidence:
            for name, value in _FACT.findall(evidence_line.text):
                facts[name.lower().replace(" ", "_")] = value.rstrip(".")
            if gpus := _GPU.findall(evidence_line.text):
                facts["uuid"] = gpus[-1]
    return facts


def _related_nodes(index: RecordIndex, node: str, findings: list[RaisedFinding]) -> set[str]:
    """Return the other nodes where a hardware check failed for the same cause within 10 min of this node's failure."""
    critical = [raised for raised in findings if raised.critical and raised.finding.cause in HARDWARE_CAUSES]
    same_cause = (index.nodes_with_same_cause(raised.finding.cause, raised.at) for raised in critical)
    return set[str]().union(*same_cause) - {node}


def _remedy(accusing: list[RaisedFinding], infra: list[Incident]) -> Remedy:
    failing = [raised.finding.remedy for raised in accusing if raised.finding.verdict is Verdict.FAIL]
    known = failing or [raised.finding.remedy for raised in accusing]
    if not known and infra and infra[-1].node_lost:
        return Remedy.NONE
    return max(known, key=_SEVERITY.index, default=Remedy.NONE)


def _advice(verdict: str, remedy: Remedy, lemon: lemons.Lemon, drain: DrainState, alone: list[str]) -> str:
    """Return the recommended action.

    ``alone`` names the users who report open findings about the node, if they are too few to accuse the node
    (:mod:`.corroboration`).
    """
    if drain.owner == "foreign":
        return "none: it is already drained"
    if verdict == Verdict.FAIL.value:
        again = f"; it fails repeatedly (lemon score {lemon.score:g}): test it thoroughly" if lemon.lemon else ""
        advice = ADVICE[Remedy.DRAIN if remedy in (Remedy.NONE, Remedy.RESTART) else remedy] + again
        return _drained_already(advice) if drain.drained else advice
    if lemon.lemon:
        advice = f"lemon: drain it and test it thoroughly (score {lemon.score:g})"
        return _drained_already(advice) if drain.drained else advice
    if alone:
        return f"watch; only records of {' and '.join(alone)} report it: verify with rrl health check on the node"
    if verdict == Verdict.WARN.value:
        return f"watch; {ADVICE[remedy]}" if remedy is not Remedy.NONE else ADVICE[Remedy.NONE]
    return "undrain it if it was repaired" if drain.owner == "rrl" else "none"


def _drained_already(advice: str) -> str:
    return "find its fault" if advice == ADVICE[Remedy.DRAIN] else advice.replace("drain it and ", "")


def _scontrol(
    name: str,
    verdict: str,
    lemon: lemons.Lemon,
    drain: DrainState,
    shown: list[RaisedFinding],
    acts: list[tuple[RunHistory, ActionTaken]],
) -> str:
    """Return the command to drain the node; empty if the node is drained or need not be drained.

    ``shown`` is the evidence for the drain.
    """
    if drain.drained or not (verdict == Verdict.FAIL.value or lemon.lemon):
        return ""
    ours = next((act.reason for _, act in reversed(acts) if drain_owner(act.reason) is not DrainOwner.OTHER), "")
    if not ours:
        run = shown[-1].run if shown else "report"
        text = shown[-1].finding.evidence[0].text if shown and shown[-1].finding.evidence else "lemon node"
        cause = shown[-1].finding.cause.value if shown else "node"
        ours = f"{RUN_PREFIX}{run}: {cause}: {text}"
    return drain_line(name, ours)


def drain_line(node: str, reason: str) -> str:
    """Return the command to drain a node, quoted for a shell because the reason may contain any user's text."""
    return f"scontrol update nodename={node} state=drain reason={shlex.quote(clipped(reason)[:200])}"


def _action(history: RunHistory, act: ActionTaken) -> ReportLine:
    by = f" for {act.by}" if act.by else ""
    action = act.action.replace("_", " ")
    why = act.reason or (act.evidence[0] if act.evidence else "")
    rejection_text = f" (not drained: {act.rejection})" if act.rejection else ""
    return ReportLine(
        act.at, f"{history.user}/{history.run}", f"{action}{by}: {why}{rejection_text}" if why else f"{action}{by}"
    )


def _is_shared(index: RecordIndex, raised: RaisedFinding) -> bool:
    """Return whether the cause of a finding is probably shared with other nodes.

    A cause is probably shared if there is no proof against this node, and other nodes failed for the same cause at
    about the same time.
    """
    doubtful = Flag.HELD_BACK in raised.finding.flags or not raised.finding.proof
    return doubtful and bool(index.nodes_with_same_cause(raised.finding.cause, raised.at) - {raised.finding.node})


def _lemon(index: RecordIndex, name: str, by_check: bool) -> lemons.Lemon:
    """Return the node's lemon score. ``by_check`` is True if the site's own check has drained the node."""
    since = index.lemon_since
    incidents = [incident for incident in index.incidents_of.get(name, []) if index.counts_for_lemons(incident)]
    critical = [raised for raised in index.findings.get(name, []) if raised.at >= since and raised.critical]
    hardware = [
        raised for raised in critical if raised.finding.cause in HARDWARE_CAUSES and not _is_shared(index, raised)
    ]
    xids = [raised for raised in critical if "xid" in raised.finding.detector.lower()]
    acts = [(history, act) for history, act in index.actions.get(name, []) if act.at >= since]
    drains = [(history, act) for history, act in acts if act.action in ("drained", "drain_requested") and not act.by]
    exclusions = [(history, act) for history, act in acts if act.action == "excluded" and act.cause and not act.by]
    held_s = index.held_s(name, since)
    times = [
        *(incident.at for incident in incidents),
        *(raised.at for raised in hardware),
        *(act.at for _, act in drains),
    ]
    signals = lemons.Signals(
        node_failures_alone=sum(not incident.related_nodes for incident in incidents),
        node_failures_together=sum(bool(incident.related_nodes) for incident in incidents),
        failure_rate=int(lemons.fails_more_often(len(incidents), held_s, index.lemon_failures, index.lemon_held_s)),
        out_of_service=len({act.at // DAY_S for _, act in drains}),
        hardware_findings=len({raised.at // DAY_S for raised in hardware}),
        xids=len({(raised.finding.component, raised.at // DAY_S) for raised in xids}),
        excluded_by_users=len({history.user for history, _ in exclusions}),
        days=len({at // DAY_S for at in times}),
    )
    weight = lemons.WEIGHTS
    scored = [
        Signal(
            weight["node_failures_together" if incident.related_nodes else "node_failures_alone"],
            incident.witnesses,
            incident.trusted,
        )
        for incident in incidents
    ]
    by_cause = witnesses_of(critical)
    by_user_and_day = {(raised.user, raised.at // DAY_S): raised for raised in hardware}
    scored += [_signal(weight["hardware_findings"], raised, by_cause, by_check) for raised in by_user_and_day.values()]
    xids_by_user = {(raised.user, raised.finding.component, raised.at // DAY_S): raised for raised in xids}
    scored += [_signal(weight["xids"], raised, by_cause, by_check) for raised in xids_by_user.values()]
    drain_days = {(history.user, act.at // DAY_S, history.trusted) for history, act in drains}
    scored += [Signal(weight["out_of_service"], (user,), trusted) for user, _, trusted in drain_days]
    excluding_users = {(history.user, history.trusted) for history, _ in exclusions}
    scored += [Signal(weight["excluded_by_users"], (user,), trusted) for user, trusted in excluding_users]
    return lemons.score_lemon(signals, score_by_users(scored))


def _signal(weight: float, raised: RaisedFinding, by_cause: dict[Cause, Witnesses], by_check: bool) -> Signal:
    return Signal(weight, (raised.user,), raised.trusted, confirmed(raised, by_cause, by_check))
