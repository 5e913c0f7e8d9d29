"""The modules of the product and the imports between them, from their sources: nothing is imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rrl.tests.support.syntax_tree import parse

PACKAGES = ("api", "cli", "cluster", "config", "core", "health", "manager", "roles", "slurm_templates", "transport")


class Import(NamedTuple):
    importer: str
    imported: str
    line: int


class Product:
    """Modules below a folder that stands for the package ``rrl``, and the imports between them.

    An import within a function counts, because it only delays the effect of a circle until the first call; so does an
    import for type checkers, because a reader needs both modules to understand one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        found = [root / "__init__.py", *(path for name in PACKAGES for path in sorted((root / name).rglob("*.py")))]
        self.files = {_module_of(path.relative_to(root)): path for path in found if path.exists()}
        self.imports = [one for module, path in self.files.items() for one in self._imports_of(module, path)]

    def _imports_of(self, module: str, path: Path) -> Iterator[Import]:
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(parse(path.read_text(), path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = _source(node, package)
                names = [f"{source}.{alias.name}" for alias in node.names]
                names = [name if name in self.files else source for name in names]
            else:
                continue
            yield from {Import(module, name, node.lineno) for name in names if name in self.files and name != module}

    def place(self, one: Import) -> str:
        """Return a description of an import for a message: its file, line and target."""
        path = self.files[one.importer].relative_to(self.root)
        return f"    {path}:{one.line} imports {one.imported.removeprefix('rrl.')}"


def has_code(text: str) -> bool:
    """Return whether a module has more than a docstring."""
    body = parse(text).body
    return bool(body[1:]) or bool(body and not isinstance(body[0], ast.Expr))


def strongly_connected(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Return each set of two or more nodes in which every node reaches every other."""
    after: dict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        after[start].add(end)
    reached = {node: _reached(node, after) for node in list(after)}
    groups = {
        frozenset({node} | {other for other in those if node in reached.get(other, ())})
        for node, those in reached.items()
    }
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reached(start: str, after: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(after.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(after.get(node, ()))
    return found


def _module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("rrl", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _source(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module in a ``from`` statement of ``package``."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)
