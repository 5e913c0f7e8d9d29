"""docs/troubleshooting.md quotes messages that the program really prints."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^> `(.+)`$", PAGE.read_text(), re.MULTILINE)
MIN_CHARS = 4
"""Smallest length (characters) of a part of a message between two values. Shorter parts are not compared."""


def _texts() -> Iterator[str]:
    """Yield the texts in the code; in f-strings, … replaces each value."""
    for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]:
        for path in sorted(ROOT.joinpath(*package.split(".")[1:]).glob("*.py")):
            for node in ast.walk(parse(path.read_text(), path)):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.fixture(scope="module")
def texts() -> str:
    return "\0".join(_texts())


def _pattern(message: str) -> str:
    """Return a regular expression for one text that contains all parts of the message in order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if len(part.strip()) >= MIN_CHARS]
    assert parts, message
    return "[^\\0]*".join(parts)


def test_page_quotes_more_than_25_different_messages() -> None:
    assert len(QUOTED) > 25
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_of_the_page_is_in_the_code(message: str, texts: str) -> None:
    assert re.search(_pattern(message), texts)


def test_a_message_that_nobody_prints_is_found(texts: str) -> None:
    assert not re.search(_pattern("the flux … of the run is full"), texts)


def test_every_quoted_message_has_an_explanation() -> None:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        for group in re.findall(r"((?:^> .+\n)+)\n(.*)", section, re.MULTILINE):
            assert group[1].strip(), group[0]
            assert not group[1].startswith((">", "#")), group[0]
