"""Parses Python sources for the tests that check how the code is written."""

from __future__ import annotations

import ast
from pathlib import Path


def parse(source: str, path: Path | str = "<source>") -> ast.Module:
    """Return the syntax tree of a module.

    CPython 3.11 counts the depth of a tree in state that all threads share. So the parse of a correct source may end in
    SystemError ("AST constructor recursion depth mismatch"); a second parse succeeds.
    """
    try:
        return ast.parse(source, path)
    except SystemError:
        return ast.parse(source, path)
