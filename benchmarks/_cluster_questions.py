"""Finds the places of the product that ask for the name of a cluster instead of its traits (rrl.cluster.traits)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rrl.cluster.traits import CLUSTERS
from rrl.tests.support.import_graph import PACKAGES

TABLE = "cluster/traits.py"
"""The table that maps the names to traits."""


def cluster_questions(root: Path) -> list[str]:
    """Return ``file:line`` of each question for a cluster's name in the product below ``root``.

    The table of the traits and a cluster's own module or folder may know the name.
    """
    own = tuple(traits.module.removeprefix("rrl.").replace(".", "/") for traits in CLUSTERS.values())
    folders = tuple(f"cluster/{name}/" for name in CLUSTERS)
    found = []
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name != TABLE and name.removesuffix(".py") not in own and not name.startswith(folders):
            found += [f"{name}:{line}" for line in sorted(set(question_lines(path.read_text())))]
    return found


def question_lines(source: str) -> Iterator[int]:
    """Yield the lines of a source on which a cluster's name is asked for.

    These are a comparison with the name, or with a collection that contains it; a ``case`` of it; a constant of a
    module that stands for it; and a table with the names of several clusters as its keys.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(map(_has_name, (node.left, *node.comparators))):
                yield node.lineno
            case ast.MatchValue() if _has_name(node.value):
                yield node.lineno
            case ast.Dict() if sum(key is not None and _has_name(key) for key in node.keys) > 1:
                yield node.lineno
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value and _has_name(statement.value):
            yield statement.lineno


def _has_name(node: ast.expr) -> bool:
    """Return whether the expression is the name of a cluster, or a collection that contains one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_has_name, node.elts))
    return isinstance(node, ast.Constant) and node.value in CLUSTERS
