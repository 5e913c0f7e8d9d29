"""No decision matches text that rrl wrote for people, because the match would break when the text is reworded.

The output of other programs is parsed once, in the modules of :data:`PARSERS`, and becomes an enum or a number there.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "cli", "cluster", "config", "core", "health", "manager", "roles")
TEXTS = frozenset(
    {
        "because",
        "detail",
        "details",
        "err",
        "evidence",
        "message",
        "last_line",
        "out",
        "output",
        "reason",
        "reasons",
        "rejection",
        "said",
        "stderr",
        "stdout",
        "text",
        "told",
        "why",
    }
)
"""Names of variables and attributes that hold text for people, and last words of such names (as in ``srun_output``)."""
ONE_TEXT = frozenset({"detail", "reason", "why"})
"""Names that always hold a single text and never a collection, so that any ``in`` searches the text."""
MATCHES = frozenset({"startswith", "endswith"})
CLEANS = frozenset({"lower", "upper", "strip", "lstrip", "rstrip", "casefold"})
"""Methods that return the same text, trimmed or in another case."""
INSTEAD = {
    "detail": "RejectReason on the event or the Refused, ProbeResult on the answer, an enum beside the detail",
    "evidence": "Finding.detector, Finding.flags",
    "reason": "drain_owner() for a drain of Slurm, else an enum beside the reason",
    "text": "Finding.flags, Evidence.source, an enum beside the text",
    "why": "ExitReason on the end of a step, UnreadCause on an Unread, an enum beside the why",
}
"""For each name of a text, what a decision must use instead of the text."""
PARSERS = {
    "cli/main.py": "appends punctuation to a message of click",
    "health/history/user_files.py": "splits files into lines",
    "health/readers": "reads what dcgmi, the driver and the kernel print",
    "cluster/slurm/commands.py": "reads the errors that Slurm's commands print",
    "cluster/slurm/requests.py": "reads what sinfo prints",
    "cluster/slurm/parsing.py": "reads what squeue and scontrol print",
    "roles/node_agent/stack_dumps.py": "reads what py-spy prints",
    "roles/rollout/vllm/engine.py": "reads vLLM's reason for the end of a sequence, which is a value of vLLM's API",
    "core/drains.py": "reads rrl's mark in the reason of a drain, because Slurm keeps no other field",
    "core/role_environment.py": "quotes paths of job.toml for a shell",
    "config/job/document.py": "reads TOML, and the settings of a command line",
}
"""Modules and folders that may match text, each with the reason. None of them decides by text that rrl wrote for
people."""
VIEWS = "cli/views"
"""Folder that only lays out text for the screen."""


def hits(source: str, package: str = "rrl") -> list[tuple[int, str]]:
    """Return line and code of each match on text in the source of a module of ``package``."""
    tree = _parsed(source, package)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.expr))
    return [(node.lineno, ast.unparse(node)) for node in nodes if _decides(node, tree)]


def _decides(node: ast.expr, tree: ast.Module) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        return isinstance(called, ast.Attribute) and called.attr in MATCHES and _is_text(called.value)
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            for one, other in ((left, right), (right, left)):
                if _is_text(one) and _is_literal(other, tree):
                    return True
        if isinstance(operator, ast.In | ast.NotIn) and isinstance(left, ast.Name) and _named(right) in ONE_TEXT:
            return True
    return False


def _named(node: ast.expr) -> str:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.strip("_")


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Attribute() if {name := _named(node), name.rpartition("_")[2]} & TEXTS:
            return True
        case ast.Subscript(value=value):
            return _is_text(value)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[joined]):
            return _is_text(joined) or (isinstance(joined, ast.GeneratorExp) and _is_text(joined.elt))
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in CLEANS:
            return _is_text(value)
    return False


def _is_literal(node: ast.expr, tree: ast.Module) -> bool:
    """Return whether a node is a string, a collection with a string, or a constant of a module that is either.

    An empty string does not count, because a comparison with it only tests whether the text is empty.
    """
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return any(_is_literal(one, tree) for one in node.elts)
    if isinstance(node, ast.Name):
        return node.id.isupper() and _names_text(node.id, tree)
    return isinstance(node, ast.Constant | ast.JoinedStr) and _holds_string(node)


def _names_text(name: str, tree: ast.Module) -> bool:
    """Return whether the constant that this name has in the module contains a string; the name may be imported."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and name in {one.id for one in _names(node.targets)}:
            return _holds_string(node.value)
        if isinstance(node, ast.AnnAssign) and name in {one.id for one in _names([node.target])}:
            return node.value is not None and _holds_string(node.value)
        if isinstance(node, ast.ImportFrom) and name in {one.asname or one.name for one in node.names}:
            module = node.module or ""
            return module.startswith("rrl.") and _names_text(name, _module(module))
    return False


def _names(targets: list[ast.expr]) -> list[ast.Name]:
    return [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _holds_string(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value for one in ast.walk(value))


@lru_cache
def _module(name: str) -> ast.Module:
    path = ROOT.joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _parsed(file.read_text(), _package(file))


def _package(file: Path) -> str:
    return ".".join(("rrl", *file.relative_to(ROOT).parent.parts))


def _parsed(source: str, package: str) -> ast.Module:
    """Parse a module and make its relative imports absolute."""
    tree = parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    return tree


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            if not any(place == one or place.startswith(f"{one}/") for one in (*PARSERS, VIEWS)):
                yield path


def test_no_decision_matches_text_for_people() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {code}; use {_instead(code)}"
        for path in modules()
        for line, code in hits(path.read_text(), _package(path))
    ]
    assert not found, "\n".join((f"{len(found)} decisions by text:", *found))


def _instead(code: str) -> str:
    return next((use for name, use in INSTEAD.items() if name in code), "an enum or a flag beside the text")


@pytest.mark.parametrize("place", PARSERS)
def test_module_listed_as_a_text_parser_still_matches_text(place: str) -> None:
    path = ROOT / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert any(hits(file.read_text(), _package(file)) for file in files), (
        f"{place} no longer matches text; remove it from PARSERS"
    )


@pytest.mark.parametrize(
    "line",
    [
        'spoiled = event.detail.startswith(("never", "at once"))',
        'spoiled = "not started" in event.detail',
        'MARK = "no handler"\nmute = ok and detail == MARK',
        'mute = "no handler" != detail',
        "waits = not why.startswith(prefix)",
        'most = any(one.text.startswith("on most") for one in evidence)',
        'joined = evidence[0].startswith("never_joined")',
        'shown = "stale" in "; ".join(evidence)',
        'shown = "stale" in "; ".join(one.text for one in found)',
        'ours = seen.detail.endswith(f": {reason}")',
        'taken = message.lower() in ("preempted", "timeout")',
        'absent = "No such file" in self._why',
        "flag = next(flag for missing, flag in FLAGS if missing in why)",
        'ran = "Exited with exit code" in srun_output',
        'known = "not found" not in ended.out',
        'GIVEN_BACK = "it was released"\nfree = node.kept_because == GIVEN_BACK',
        'EXITED = "exited"\nwanted = record.why not in (EXITED, SIGNALLED)',
    ],
)
def test_a_match_on_text_is_found(line: str) -> None:
    assert len(hits(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "ended = event.reason is ExitReason.EXITED",
        "ended = event.reason in (ExitReason.EXITED, ExitReason.SIGNALED)",
        "ENDS = frozenset({ExitReason.EXITED})\nended = event.reason in ENDS",
        'known = detail != ""',
        "same = finding.evidence == before.evidence",
        'for text in ("a", "b"): print(text)',
        'ours = name.startswith("rrl.")',
    ],
)
def test_a_decision_by_a_value_is_not_a_match(line: str) -> None:
    assert hits(line) == []
