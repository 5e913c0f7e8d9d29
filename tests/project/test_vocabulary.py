"""Identifiers and module names use the vocabulary of docs/glossary.md.

A retired word fails, with the word to use instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
ALLOWED = {
    "LINGER": "the option of ZeroMQ's sockets",
    "SO_LINGER": "an option of sockets",
    "eye": "torch's identity matrix",
}
"""Identifiers of other libraries that contain a retired word, with their meaning."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_ROW = re.compile(r"^\| ([a-z, ]+) \| (.+) \|$", re.MULTILINE)


def retired_words() -> dict[str, str]:
    """Return each retired word of the glossary's last table with the words to use instead."""
    table = GLOSSARY.read_text().partition("## Retired words")[2]
    return {word: instead for words, instead in _ROW.findall(table)[1:] for word in words.split(", ")}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each identifier that the module itself chooses or uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name


def violations(source: str, retired: dict[str, str]) -> list[str]:
    """Return one line for each identifier of a module that contains a retired word."""
    found = []
    for line, name in sorted(set(identifiers(parse(source)))):
        for word in _WORD.findall(name):
            if (instead := retired.get(word.lower())) and name.lstrip("_") not in ALLOWED:
                found.append(f"line {line}: {name}: instead of {word.lower()!r} use {instead}")
    return found


def sources() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in listed]


def test_no_identifier_contains_a_retired_word() -> None:
    retired = retired_words()
    found = {str(path.relative_to(ROOT)): violations(path.read_text(), retired) for path in sources()}
    lines = [f"{path}, {violation}" for path, listed in found.items() for violation in listed]
    assert not lines, "\n".join(lines)


def test_no_module_or_folder_is_named_with_a_retired_word() -> None:
    retired = retired_words()
    parts = {part for path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not {part: retired[word] for part in parts for word in part.split("_") if word in retired}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def told_by(x): ...", "told"),
        ("class NodeSighting: ...", "sighting"),
        ("life = 1", "life"),
        ("a.beats", "beats"),
        ("f(spot=1)", "spot"),
    ],
)
def test_a_retired_word_is_reported_with_the_word_to_use(source: str, word: str) -> None:
    retired = retired_words()
    (line,) = violations(source, retired)
    assert line.endswith(f"instead of {word!r} use {retired[word]}")


@pytest.mark.parametrize("source", ["zmq.LINGER", "heartbeat = 1", "def early(): ...", "unseen_items = 1"])
def test_a_word_that_only_resembles_a_retired_one_is_accepted(source: str) -> None:
    assert violations(source, retired_words()) == []
