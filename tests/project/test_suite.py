"""Code that several test modules use is in ``tests/support``, and not in one of these modules.

A test module that another one imports cannot be moved, renamed or split without a change of its importers. The test
parses files and does not import them.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[2]


def imported_test_modules(root: Path) -> list[str]:
    """Return place and statement of each import below ``root`` that imports a test module."""
    found = []
    modules = {path.stem for path in (root / "tests").rglob("test_*.py")}
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(parse(path.read_text(), path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            else:
                continue
            if any(part in modules for name in names for part in name.split(".")):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_test_module_is_imported_by_another() -> None:
    found = imported_test_modules(ROOT)
    assert not found, "move what these import to tests/support:\n" + "\n".join(found)


def test_every_kind_of_import_of_a_test_module_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("def helper(): ...\n")
    statements = (
        "from rrl.tests.unit.test_a import helper",
        "from rrl.tests.unit import test_a",
        "from . import test_a",
        "from .test_a import helper",
        "import rrl.tests.unit.test_a as a",
    )
    (folder / "test_b.py").write_text("\n".join((*statements, "from rrl.tests.support.crew import test_bed")))
    assert imported_test_modules(tmp_path) == [
        f"tests/unit/test_b.py:{line}: {statement}" for line, statement in enumerate(statements, start=1)
    ]


def test_files_of_make_test_fast_exist() -> None:
    printed = subprocess.run(["make", "--dry-run", "test-fast"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = {word for word in printed.stdout.split() if word.startswith("tests/")}
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]
