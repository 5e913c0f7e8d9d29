"""Show the decisions of a run, each with its reasons and its result (``rrl explain``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby

from msgspec import Struct
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from ...core.text import span
from ...core.types import Finding
from ...manager.model.actions import Finish, Why
from ...manager.reporting.decisions.expectations import Arrival, Result
from ...manager.reporting.decisions.explanations import Explanation, incarnations_of, is_repair, subject_of, words_of
from .formatting import stage

MAX_GROUP_NAMES = 8
"""Maximum number of names in an entry about processes that were started or stopped together."""
LABEL_COLUMNS = 13
"""Columns before the texts of an entry."""
MIN_TEXT_COLUMNS = 20
"""Minimum number of columns of the texts, even on a narrow terminal."""
AS_EXPECTED = "as expected so far"
"""Result of an effect that is expected to last, and has lasted so far."""
_ARRIVAL = {Arrival.CAME: "green", Arrival.HOLDS: "green", Arrival.MISSED: "red"}


def explanation_view(explanations: Sequence[Explanation], *, grouped: bool) -> RenderableType:
    """Return the decisions in order; with ``grouped``, starts and stops that follow each other share one entry."""
    views: list[RenderableType] = []
    if grouped:
        for routine, run in groupby(explanations, lambda one: not is_repair(one.action)):
            together = list(run)
            views += [_group(together)] if routine and len(together) > 1 else map(_entry, together)
    else:
        views += map(_entry, explanations)
    restarted = [one for explanation in explanations for one in incarnations_of(explanation.action) if one.number > 1]
    for one in restarted[:1]:
        views.append(Text(f"{one} is start number {one.number} of {one.replica}.", "bright_black"))
    return Group(*views)


def _entry(explanation: Explanation) -> RenderableType:
    why = explanation.action.why
    title = f"{words_of(explanation.action)} {subject_of(explanation)}".rstrip()
    rows = [("because", Text("; ".join(why.evidence)))]
    rows += [("found by", Text(_finding_text(one, explanation.at))) for one in explanation.findings]
    if why.rung is not None:
        rows.append(("repair", Text(why.rung.value)))
        rows += [("" if row else "before it", Text(text)) for row, text in enumerate(_lower_texts(why))]
    rows.append(("then" if isinstance(explanation.action, Finish) else "expected", _expected(explanation)))
    return _block(explanation.at, explanation.step, title, rows)


def _group(explanations: Sequence[Explanation]) -> RenderableType:
    """Return one entry for processes that were started or stopped one after the other."""
    by_words: dict[str, list[Explanation]] = {}
    for explanation in explanations:
        by_words.setdefault(words_of(explanation.action), []).append(explanation)
    rows: list[tuple[str, Text]] = []
    for words, members in by_words.items():
        names = [subject_of(one) for one in members[:MAX_GROUP_NAMES]]
        more = f" and {len(members) - len(names)} more" if len(members) > len(names) else ""
        reason = "; ".join(members[0].action.why.evidence) + (", and so on" if members[1:] else "")
        rows += [(words, Text(f"{', '.join(names)}{more}")), ("because", Text(reason))]
        rows.append(("expected", _group_result(members)))
    title = ", ".join(f"{words} {len(members)}" for words, members in by_words.items())
    return _block(explanations[0].at, explanations[0].step, f"{title} processes", rows)


def _group_result(members: Sequence[Explanation]) -> Text:
    """Return how many of the expected effects occurred, and the first effects that did not."""
    came = [one for one in members if one.result.arrival is Arrival.CAME]
    expects = members[0].action.why.expects or "it ends"
    text = Text(f"{expects}{', and so on' if members[1:] else ''}: ")
    text.append(f"{len(came)} of {len(members)} came", "green" if len(came) == len(members) else "yellow")
    for one in [one for one in members if one.result.arrival is Arrival.MISSED][:MAX_GROUP_NAMES]:
        text.append(f"; {subject_of(one)}: {one.result.text}", "red")
    return text


def _block(at: float, step: int, title: str, rows: Sequence[tuple[str, Text]]) -> RenderableType:
    head = Text(f"{_date_and_time(at)}  {f'step {step}  ' if step else ''}", "bright_black")
    head.append(title, "bold")
    return _Block(head, rows)


class _Block:
    """An entry: its heading, and rows that each have a label and, beside the label, a text that wraps.

    A table for each entry would be slower, and a long run has thousands of entries.
    """

    def __init__(self, head: Text, rows: Sequence[tuple[str, Text]]) -> None:
        self._head, self._rows = head, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._head
        columns, grey = max(MIN_TEXT_COLUMNS, options.max_width - LABEL_COLUMNS), console.get_style("bright_black")
        fits = columns + LABEL_COLUMNS <= options.max_width
        for label, text in self._rows:
            for number, line in enumerate(_lines(text, console, columns)):
                indent = f"   {'' if number else label}".ljust(LABEL_COLUMNS)
                if fits:
                    yield Segment(indent, grey)
                    yield from line.render(console, end="\n")
                else:  # rich wraps these lines again: the terminal is narrower than label and text
                    yield Text.assemble((indent, "bright_black"), line)
        yield ""


def _lines(text: Text, console: Console, columns: int) -> Iterable[Text]:
    """Wrap a text into lines of at most ``columns`` columns.

    A text that fits is returned as it is, because wrapping is slow.
    """
    if text.plain.isprintable() and text.cell_len <= columns:
        return (text,)
    lines = text.wrap(console, columns)
    for line in lines:
        line.rstrip()
    return lines


def _lower_texts(why: Why) -> Iterator[str]:
    for lower in why.lower:
        rungs = ", ".join(rung.value for rung in lower.rungs) or "every smaller repair"
        yield f"{rungs}: needed {lower.needed}"


def _finding_text(finding: Finding, at: float) -> str:
    """Return a finding's title, the sources of its evidence, and how long before the decision its first sign was.

    ``at`` is the time of the decision (s). The first sign is left out if it is not known to precede the decision.
    """
    sources = ", ".join(dict.fromkeys(one.source for one in finding.evidence))
    first = f"; first sign {span(at - finding.since)} before" if 0 < finding.since < at else ""
    return f"{finding.title} ({sources}){first}"


def _expected(explanation: Explanation) -> Text:
    why, result = explanation.action.why, explanation.result
    by = f" by {_deadline(why.deadline, explanation.at)}" if why.deadline is not None else ""
    text = Text(f"{why.expects or 'it is done'}{by}: ")
    text.append(_result_text(result, explanation.at), _ARRIVAL.get(result.arrival, "yellow"))
    if is_late(explanation):
        text.append(" (too late)", "yellow")
    return text


def is_late(explanation: Explanation) -> bool:
    """Return whether the expected effect occurred after its deadline."""
    result, deadline = explanation.result, explanation.action.why.deadline
    return result.arrival is Arrival.CAME and deadline is not None and result.at is not None and result.at > deadline


def _result_text(result: Result, decided_at: float) -> str:
    if result.at is None:
        return AS_EXPECTED if result.arrival is Arrival.HOLDS else result.arrival.value
    after = f"after {stage(result.at - decided_at)}"
    if result.arrival in (Arrival.MISSED, Arrival.OVER):
        return f"{result.arrival.value}: {result.text}, {after}"
    return f"{result.arrival.value} {after}, {result.text}"


def _date_and_time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%m-%d %H:%M:%S")


def _deadline(at: float, decided_at: float) -> str:
    """Return a time, with its date if that is not the date of the decision."""
    day = datetime.fromtimestamp(decided_at).date()
    return f"{datetime.fromtimestamp(at):%H:%M:%S}" if datetime.fromtimestamp(at).date() == day else _date_and_time(at)


class EvidenceRecord(Struct, frozen=True):
    """One line of evidence of a finding."""

    source: str
    text: str
    time: float
    """When the evidence was observed (s since 1970)."""


class FindingRecord(Struct, frozen=True):
    """A finding behind a decision."""

    detector: str
    cause: str
    since: float
    """Since when the finding holds (s since 1970)."""
    evidence: list[EvidenceRecord]


class SmallerRepair(Struct, frozen=True):
    """Repairs that come before the chosen repair, and what they would have needed."""

    repairs: list[str]
    """Names of the repairs; an empty list stands for every repair before the chosen repair."""
    needed: str


class DecisionRecord(Struct, frozen=True):
    """A decision: an object of the output of ``rrl explain --json``. Times are the manager's (s since 1970)."""

    time: float
    step: int
    """Training step in progress; 0 in a run without training."""
    decision: str
    subject: str
    node: str | None
    evidence: list[str]
    findings: list[FindingRecord]
    repair: str | None
    smaller_repairs: list[SmallerRepair]
    expected: str
    """What the decision should achieve."""
    deadline: float | None
    result: str
    """What became of the expected effect: ``came``, ``did not come``, ``awaited``, ``no longer awaited`` or
    ``holds so far``."""
    result_text: str
    result_time: float | None
    late: bool
    """True if the result came after the deadline."""


def decision_record(explanation: Explanation) -> DecisionRecord:
    """Return a decision as plain values, for programs."""
    why, result = explanation.action.why, explanation.result
    return DecisionRecord(
        time=explanation.at,
        step=explanation.step,
        decision=words_of(explanation.action),
        subject=subject_of(explanation),
        node=explanation.node or None,
        evidence=list(why.evidence),
        findings=[_finding_record(one) for one in explanation.findings],
        repair=why.rung.value if why.rung is not None else None,
        smaller_repairs=[SmallerRepair([rung.value for rung in one.rungs], one.needed) for one in why.lower],
        expected=why.expects,
        deadline=why.deadline,
        result=result.arrival.value,
        result_text=result.text,
        result_time=result.at,
        late=is_late(explanation),
    )


def _finding_record(finding: Finding) -> FindingRecord:
    evidence = [EvidenceRecord(one.source, one.text, one.at) for one in finding.evidence]
    return FindingRecord(finding.detector, finding.cause.value, finding.since, evidence)
