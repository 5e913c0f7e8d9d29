"""Parse py-spy's stack dumps of hung processes, and group ranks with equal stacks, as ByteRobust does.

Healthy ranks of a gang mostly wait in the same place for the rank that hangs. Ranks with equal stacks form a group, the
dominant groups are assumed to be healthy, and the ranks of all other groups are outliers (ByteRobust 2.2). Only the
main threads of a rank's processes are compared: helper threads (heartbeats, autograd, thread pools) change from moment
to moment. The module is pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ....core.types import Incarnation
from ..records import StackSample

Dumps = Mapping[Incarnation, Mapping[int, str]]
"""Incarnation → process id → py-spy's dump or, if py-spy failed, the kernel's state of the process."""
Stack = tuple[str, ...]
"""Frames as ``function (file:line)`` or ``function (file)``, innermost first."""

MAIN = "MainThread"
"""Name of the main thread in a dump."""
KERNEL = "kernel"
"""Function name of the single frame of a process that py-spy could not read, because the process is blocked in the
kernel."""
_DOMINANT_SHARE = 0.5
"""Minimum size of a dominant group, as a share of the largest group. Several groups can be dominant, because pipeline
stages wait in different places."""
_MAX_FRAMES_NAMED = 6
"""Maximum number of innermost frames that evidence names; the dump file contains the whole stack."""
_MAX_INCARNATIONS_NAMED = 3
"""Maximum number of incarnations that one line names; further incarnations are counted."""
_MAX_LINES = 5
"""Maximum number of evidence lines (docs/sources.md)."""
_THREAD = re.compile(r'Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?$')
_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.*?)(?::(?P<line>\d+))?\)$")
_IN_KERNEL = re.compile(r"state (?P<state>\S) .*; kernel: (?P<where>\S+)$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Frame(Struct, frozen=True):
    """One frame of a stack."""

    function: str
    file: str
    """Name of the file without folders: two nodes may have the same program at different paths."""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.function} ({self.file}{'' if self.line is None else f':{self.line}'})"


class Thread(Struct, frozen=True):
    """One thread of a dump."""

    id: str
    state: str
    """State as py-spy names it, such as ``active``, ``active+gil`` or ``idle`` (waits in the kernel). If py-spy could
    not read the process, this is its state letter in /proc."""
    frames: tuple[Frame, ...]
    """Frames, innermost first."""
    name: str = ""


class StackGroup(Struct, frozen=True):
    """Incarnations with equal stacks."""

    incarnations: tuple[Incarnation, ...]
    stack: Stack
    """Stack of these incarnations. If an incarnation has several processes with different stacks, it is a stack that
    the largest group does not have or, if there is none, the stack of the oldest process."""


class GroupedStacks(Struct, frozen=True):
    """The groups of a gang's stacks."""

    groups: tuple[StackGroup, ...] = ()
    """Groups, the largest first."""
    outliers: tuple[Incarnation, ...] = ()
    """Incarnations that are not in a dominant group; empty if no group dominates."""


def parse(dump: str) -> list[Thread]:
    """Return the threads of a dump. Lines that do not belong to a thread are skipped. Any text is accepted."""
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
    """Return the main thread of a dump, or None if there are no threads.

    If the program never imported ``threading``, no thread has a name, and the main thread is the last one.
    """
    threads = parse(dump)
    named = [thread for thread in threads if thread.name == MAIN and thread.frames]
    return next(iter(named), threads[-1] if threads else None)


def group(dumps: Dumps) -> GroupedStacks:
    """Group incarnations by their stacks.

    Line numbers are compared only if all stacks without line numbers are equal, and most ranks also have equal line
    numbers. Ranks that compute are at different lines of a loop; ranks that wait for each other are at the same line.
    """
    coarse = _grouped(dumps, lines=False)
    if len(coarse.groups) > 1:
        return coarse
    fine = _grouped(dumps, lines=True)
    largest = max((len(stack_group.incarnations) for stack_group in fine.groups), default=0)
    return fine if largest > len(dumps) / 2 else coarse


def sample(dumps: Dumps, members: Iterable[Incarnation]) -> StackSample | None:
    """Return the stacks of the ``members`` of a gang at one time; None if a member has no stack."""
    texts = [dumps.get(member, {}).values() for member in members]
    exact = [_text(_stacks(each, lines=True)) for each in texts]
    if not all(exact):
        return None
    functions = [_text(_stacks(each, lines=False)) for each in texts]
    return StackSample("\n\n".join(exact), "\n\n".join(functions), len(set(exact)) == 1)


def _text(stacks: frozenset[Stack]) -> str:
    return "\n\n".join(sorted("\n".join(stack) for stack in stacks if stack))


def summary_lines(grouped: GroupedStacks, max_lines: int = _MAX_LINES) -> tuple[str, ...]:
    """Describe the groups in at most ``max_lines`` lines for people, outliers first."""
    outliers = set(grouped.outliers)
    total = sum(len(stack_group.incarnations) for stack_group in grouped.groups)
    ordered = sorted(grouped.groups, key=lambda stack_group: not outliers.issuperset(stack_group.incarnations))
    lines = []
    for stack_group in ordered:
        count, names = len(stack_group.incarnations), _names(stack_group.incarnations)
        if outliers and outliers.isdisjoint(stack_group.incarnations):
            names = f"{count} of {total} alike" if count > 1 else names
        elif outliers:
            names = f"outlier {names}"
        lines.append(f"{names}: {_stack_text(stack_group.stack)}")
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more groups"]
    return tuple(lines)


def main_threads_only(dumps: Mapping[int, str]) -> dict[int, str]:
    """Reduce the dumps of one incarnation to their main threads, which is all that :func:`group` uses."""
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
    """Group the incarnations by equal stacks, with or without line numbers."""
    stacks = {incarnation: _stacks(texts.values(), lines) for incarnation, texts in dumps.items()}
    members: dict[frozenset[Stack], list[Incarnation]] = {}
    for incarnation in sorted(stacks):
        members.setdefault(stacks[incarnation], []).append(incarnation)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[1]))
    largest = len(ordered[0][1]) if ordered else 0
    dominant_size = max(2.0, _DOMINANT_SHARE * largest)
    groups = tuple(
        StackGroup(tuple(incarnations), _distinguishing(dumps[incarnations[0]], signature, ordered[0][0]))
        for signature, incarnations in ordered
    )
    if largest < 2:
        return GroupedStacks(groups)
    outliers = [
        incarnation for _, incarnations in ordered if len(incarnations) < dominant_size for incarnation in incarnations
    ]
    return GroupedStacks(groups, tuple(sorted(outliers)))


def _stacks(texts: Iterable[str], lines: bool) -> frozenset[Stack]:
    """Return the distinct main-thread stacks of an incarnation's processes."""
    stacks = set()
    for text in texts:
        thread = main_thread(text)
        if thread is not None:
            stacks.add(tuple(_normal(frame, lines) for frame in thread.frames))
    return frozenset(stacks)


def _normal(frame: Frame, lines: bool) -> str:
    """Return the text of a frame without addresses, which differ between processes of one program."""
    plain = Frame(_ADDRESS.sub("0x", frame.function), _ADDRESS.sub("0x", frame.file), frame.line if lines else None)
    return str(plain)


def _distinguishing(dumps: Mapping[int, str], signature: frozenset[Stack], largest: frozenset[Stack]) -> Stack:
    """Return the stack, with line numbers, that represents a group: if possible, one that the largest group lacks.

    If there is no such stack, return the stack of the oldest process. ``dumps`` are the dumps of an incarnation of the
    group, ``signature`` its stacks, and ``largest`` the stacks of the largest group.
    """
    threads = [thread for pid in sorted(dumps) if (thread := main_thread(dumps[pid])) is not None]
    different = signature - largest
    for thread in threads:
        if {tuple(_normal(frame, lines) for frame in thread.frames) for lines in (False, True)} & different:
            return tuple(map(str, thread.frames))
    return tuple(map(str, threads[0].frames)) if threads else ()


def _stack_text(stack: Sequence[str]) -> str:
    if not stack:
        return "no stack"
    shown = " < ".join(stack[:_MAX_FRAMES_NAMED])
    return shown if len(stack) <= _MAX_FRAMES_NAMED else f"{shown} < ..."


def _names(incarnations: Sequence[Incarnation]) -> str:
    shown = ", ".join(map(str, incarnations[:_MAX_INCARNATIONS_NAMED]))
    unnamed = len(incarnations) - _MAX_INCARNATIONS_NAMED
    return f"{shown} and {unnamed} more" if unnamed > 0 else shown


def _base(file: str) -> str:
    return file.rpartition("/")[2]
