"""What processes that hang are doing: py-spy's dumps read, and ranks grouped by them as ByteRobust does.

Ranks of one gang that are healthy mostly wait in the same place for the one that is not: stacks that are equal form a
group, the dominant groups are taken for healthy, the ranks of all others are the outliers (ByteRobust 2.2). Each rank
is represented by the main threads of all its processes: helper threads (ours that beats, autograd's, a pool's) differ
from moment to moment and say nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ....core.types import Incarnation

Dumps = Mapping[Incarnation, Mapping[int, str]]
"""By life: process id → what py-spy said of it, or in its place :mod:`rrl.roles.agent.stack_dumps`."""
Stack = tuple[str, ...]
"""``function (file:line)`` or ``function (file)``, innermost first"""

MAIN = "MainThread"
KERNEL = "kernel"
"""the function of the one frame that stands for a process that could not be looked into"""
_DOMINANT = 0.5
"""a group of at least this share of the largest is dominant too: the stages of a pipeline wait in different places"""
_MAX_FRAMES_NAMED = 6
"""innermost frames that evidence names; the whole stack is in the file"""
_MAX_INCARNATIONS_NAMED = 3
"""outliers that one line names; the others are counted"""
_MAX_LINES = 5
"""docs/sources.md: at most five lines of evidence"""
_THREAD = re.compile(r'Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?$')
_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")
_IN_KERNEL = re.compile(r"state (?P<state>\S) .*; kernel: (?P<where>\S+)$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Frame(Struct, frozen=True):
    function: str
    file: str
    """its name without folders: two nodes may have the same program under two paths"""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.function} ({self.file}{'' if self.line is None else f':{self.line}'})"


class Thread(Struct, frozen=True):
    id: str
    state: str
    """``active``, ``idle`` (waits in the kernel), ``active+gil``, ...; of a process that could not be looked into its
    state letter"""
    frames: tuple[Frame, ...]
    """innermost first"""
    name: str = ""


class StackGroup(Struct, frozen=True):
    """Lives whose stacks are equal."""

    incarnations: tuple[Incarnation, ...]
    stack: Stack
    """of the process that says most: the one in which these differ from the largest group, else the command's own"""


class GroupedStacks(Struct, frozen=True):
    groups: tuple[StackGroup, ...] = ()
    """the largest first"""
    outliers: tuple[Incarnation, ...] = ()
    """in none of the dominant groups; nobody where no group dominates"""


def parse(dump: str) -> list[Thread]:
    """The threads in py-spy's text. Lines that are none of a thread are passed over: nothing raises."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            frames = []
            threads.append(Thread(match["id"], match["state"], (), match["name"] or ""))
        elif threads and (match := _FRAME.match(line)):
            frames.append(Frame(match["function"], _base(match["file"]), int(match["line"]) if match["line"] else None))
            threads[-1] = Thread(threads[-1].id, threads[-1].state, tuple(frames), threads[-1].name)
        elif match := _IN_KERNEL.match(line):
            threads.append(Thread("main", match["state"], (Frame(KERNEL, match["where"]),), MAIN))
    return threads


def main_thread(dump: str) -> Thread | None:
    """The one called so; in a program that never imported ``threading`` none has a name, and it is the last one."""
    threads = parse(dump)
    named = [thread for thread in threads if thread.name == MAIN and thread.frames]
    return next(iter(named), threads[-1] if threads else None)


def group(dumps: Dumps) -> GroupedStacks:
    """Who is where. Line numbers count only where nothing else tells ranks apart, and most of them still agree then:
    ranks that compute pass through the lines of one loop, those that wait for one another stand still."""
    coarse = _grouped(dumps, lines=False)
    if len(coarse.groups) > 1:
        return coarse
    fine = _grouped(dumps, lines=True)
    largest = max((len(one.incarnations) for one in fine.groups), default=0)
    return fine if largest > len(dumps) / 2 else coarse


def summary_lines(grouped: GroupedStacks, max_lines: int = _MAX_LINES) -> tuple[str, ...]:
    """At most ``most`` lines for people: the outliers first, then where the others are."""
    outliers = set(grouped.outliers)
    total = sum(len(one.incarnations) for one in grouped.groups)
    ordered = sorted(grouped.groups, key=lambda one: not outliers.issuperset(one.incarnations))
    lines = []
    for one in ordered:
        names = _names(one.incarnations)
        if outliers and outliers.isdisjoint(one.incarnations):
            names = f"{len(one.incarnations)} of {total} alike" if len(one.incarnations) > 1 else names
        elif outliers:
            names = f"outlier {names}"
        lines.append(f"{names}: {_stack_text(one.stack)}")
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more groups"]
    return tuple(lines)


def main_threads_only(dumps: Mapping[int, str]) -> dict[int, str]:
    """What :func:`group` needs of the dumps of one life, for who cannot keep the whole."""
    short = {}
    for pid, dump in dumps.items():
        if (thread := main_thread(dump)) is not None:
            frames = "".join(f"    {frame}\n" for frame in thread.frames)
            head = f'Thread {thread.id} ({thread.state}): "{MAIN}"\n'
            if thread.frames and thread.frames[0].function == KERNEL:
                head, frames = f"state {thread.state} ; kernel: {thread.frames[0].file}\n", ""
            short[pid] = head + frames
    return short


def _grouped(dumps: Dumps, lines: bool) -> GroupedStacks:
    stacks = {incarnation: _stacks(texts.values(), lines) for incarnation, texts in dumps.items()}
    members: dict[frozenset[Stack], list[Incarnation]] = {}
    for incarnation in sorted(stacks):
        members.setdefault(stacks[incarnation], []).append(incarnation)
    ordered = sorted(members.items(), key=lambda one: (-len(one[1]), one[1]))
    largest = len(ordered[0][1]) if ordered else 0
    enough = max(2.0, _DOMINANT * largest)
    groups = tuple(
        StackGroup(tuple(incarnations), _distinguishing(dumps[incarnations[0]], signature, ordered[0][0]))
        for signature, incarnations in ordered
    )
    if largest < 2:
        return GroupedStacks(groups)
    outliers = [
        incarnation for _, incarnations in ordered if len(incarnations) < enough for incarnation in incarnations
    ]
    return GroupedStacks(groups, tuple(sorted(outliers)))


def _stacks(texts: Iterable[str], lines: bool) -> frozenset[Stack]:
    """Of all processes of a life; workers of a pool that stand in the same place count once."""
    found = set()
    for text in texts:
        thread = main_thread(text)
        if thread is not None:
            found.add(tuple(_normal(frame, lines) for frame in thread.frames))
    return frozenset(found)


def _normal(frame: Frame, lines: bool) -> str:
    """What two processes of one program have in common: no address, no folder."""
    plain = Frame(_ADDRESS.sub("0x", frame.function), _ADDRESS.sub("0x", frame.file), frame.line if lines else None)
    return str(plain)


def _distinguishing(dumps: Mapping[int, str], signature: frozenset[Stack], largest: frozenset[Stack]) -> Stack:
    """With line numbers: the stack that the largest group does not have; else that of the oldest process."""
    threads = [thread for pid in sorted(dumps) if (thread := main_thread(dumps[pid])) is not None]
    odd = signature - largest
    for thread in threads:
        if {tuple(_normal(frame, lines) for frame in thread.frames) for lines in (False, True)} & odd:
            return tuple(map(str, thread.frames))
    return tuple(map(str, threads[0].frames)) if threads else ()


def _stack_text(stack: Sequence[str]) -> str:
    if not stack:
        return "no stack"
    shown = " < ".join(stack[:_MAX_FRAMES_NAMED])
    return shown if len(stack) <= _MAX_FRAMES_NAMED else f"{shown} < ..."


def _names(incarnations: Sequence[Incarnation]) -> str:
    shown = ", ".join(map(str, incarnations[:_MAX_INCARNATIONS_NAMED]))
    return (
        shown
        if len(incarnations) <= _MAX_INCARNATIONS_NAMED
        else f"{shown} and {len(incarnations) - _MAX_INCARNATIONS_NAMED} more"
    )


def _base(file: str) -> str:
    return file.rpartition("/")[2]
