"""The product has no import circles, one idea per file, and no repeated module name without a reason.

The tests parse files and do not import them. ``lint-imports`` (test_layers.py) checks the direction of imports between
packages, and does not find a circle within one package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from rrl.benchmarks.code_lines import SMALL_LINES, small_modules
from rrl.tests.support.import_graph import Import, Product, strongly_connected

ROOT = Path(__file__).parents[2]
MAX_LINES = 700
"""Largest number of lines of a file. A longer file probably has more than one idea."""
MAX_SMALL_MODULES = 8
"""Largest number of small modules that only one other module imports. Such a module usually belongs into that one."""
REPEATED_NAMES = {
    "admission": "of a node: how the manager handles a Hello, and what the agent checks before it sends a Hello",
    "base": "the protocol of a package of interchangeable parts",
    "changes": "what a user changes in a run from rrl top, and what changes from one weight version to the next",
    "check": "rrl check of a job, rrl health check of a node",
    "client": "the side of a package that sends requests to its server or supervisor",
    "command": "rrl doctor, rrl logs: the command itself in a package of its parts",
    "commands": "rrl's own commands, Slurm's commands",
    "connection": "of a worker to the manager, of a client to the snapshot server",
    "drain_requests": "the report of drain requests, and the command that prints it",
    "engine": "the protocol of engines, and vLLM's",
    "episodes": "the command and its view",
    "fabric": "the reader and the check of one subject",
    "fault_injection": "the manager's part and the agent's part of an injection",
    "faults": "kinds of faults, and their table in job.toml",
    "files": "log files as the launcher writes them, and as rrl logs reads them",
    "gpu": "the reader and the check of one subject",
    "host": "the reader and the check of one subject, and the host as rrl doctor sees it",
    "kernel_log": "the reader and the check of one subject",
    "launch": "the launch file, and the manager's part that writes it",
    "main": "entry point of a program",
    "messages": "of the control plane, of the snapshot server",
    "nodes": "of Slurm, of the planner",
    "parsing": "of DCGM's output, of Slurm's",
    "process_group": "of the operating system (launcher), of torch.distributed (trainer)",
    "queries": "to NVML, to the manager's state",
    "reader": "of DCGM, of NVML",
    "records": "of heartbeats, of history files, of the trajectory log",
    "render": "of a job.toml, of a Slurm template",
    "requests": "to Slurm's commands, of agents to the trajectory store",
    "server": "of snapshots, of trajectories",
    "site": "the site's tables of job.toml, the site's report",
    "state": "of a run, of the trajectory store",
    "status": "the command and its view",
    "store": "of trajectories, of weights",
    "summary": "summary.json and its view",
    "types": "vocabulary of the whole product, vocabulary of trajectories",
    "xid_events": "the reader and the check of one subject",
}
"""Module names that several packages use, each with its meanings, which differ too much to mislead a reader."""


# ── import circles ───────────────────────────────────────────────────────────────────────────────────────────────────
def circles(imports: Mapping[tuple[str, str], list[Import]], product: Product) -> list[str]:
    """Describe each circle: its members, every import between them, and how to open it.

    Args:
        imports: The import statements by (importer, imported); both are modules or both are sub-packages.
        product: Knows the files of the modules.
    """
    found = []
    for members in strongly_connected({key for key in imports if key[0] != key[1]}):
        inside = [one for (a, b), those in imports.items() if a != b and {a, b} <= members for one in those]
        found.append(
            "\n".join(
                (
                    f"circle of {', '.join(sorted(members))}: move what both sides need to a module below them, or a"
                    " function to the side that uses it; these imports are in it:",
                    *sorted(product.place(one) for one in inside),
                )
            )
        )
    return found


def module_circles(product: Product) -> list[str]:
    imports: dict[tuple[str, str], list[Import]] = defaultdict(list)
    for one in product.imports:
        imports[one.importer, one.imported].append(one)
    return circles(imports, product)


def package_circles(product: Product) -> list[str]:
    """Describe the circles between the members of each package, which are its sub-packages and its own modules."""
    found = []
    for package in (name for name, path in product.files.items() if path.name == "__init__.py"):
        imports: dict[tuple[str, str], list[Import]] = defaultdict(list)
        for one in product.imports:
            ends = [_member(module, package) for module in (one.importer, one.imported)]
            if all(ends):
                imports[ends[0], ends[1]].append(one)
        found += circles(imports, product)
    return found


def _member(module: str, package: str) -> str:
    """Return the member of ``package`` that is or contains this module; "" if no member does."""
    if not module.startswith(f"{package}."):
        return ""
    return f"{package}.{module.removeprefix(f'{package}.').partition('.')[0]}"


# ── files and names ─────────────────────────────────────────────────────────────────────────────────────────
def long_files(product: Product) -> list[str]:
    lengths = {path.relative_to(product.root): len(path.read_text().splitlines()) for path in product.files.values()}
    return [
        f"{path} has {lines} lines, but at most {MAX_LINES} are allowed: move its second idea to another module"
        for path, lines in lengths.items()
        if lines > MAX_LINES
    ]


def misleading_names(product: Product) -> list[str]:
    """Describe repeated names that REPEATED_NAMES lacks, and names in REPEATED_NAMES that are no longer repeated."""
    paths: dict[str, list[str]] = defaultdict(list)
    for path in product.files.values():
        if path.name != "__init__.py":
            paths[path.stem].append(str(path.relative_to(product.root)))
    twice = [
        f"{' and '.join(those)} have the same name: rename one by its content, or add to REPEATED_NAMES why no reader"
        " is misled"
        for name, those in paths.items()
        if len(those) > 1 and name not in REPEATED_NAMES
    ]
    return twice + [
        f"{name} in REPEATED_NAMES is not repeated any more: remove it from REPEATED_NAMES"
        for name in REPEATED_NAMES
        if len(paths[name]) < 2
    ]


# ── the product ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def product() -> Product:
    return Product(ROOT)


def test_every_import_of_the_product_is_found(product: Product) -> None:
    assert len(product.files) > 200
    assert len(product.imports) > 1000
    known = {(one.importer, one.imported) for one in product.imports}
    assert ("rrl.manager.runtime", "rrl.manager.planner") in known
    assert ("rrl.cli.main", "rrl.cli.commands.app") in known, "imports within functions are not found"


def test_no_module_is_in_an_import_circle(product: Product) -> None:
    assert not (found := module_circles(product)), "\n".join(found)


def test_no_sub_package_is_in_an_import_circle(product: Product) -> None:
    assert not (found := package_circles(product)), "\n".join(found)


def test_no_file_of_the_product_is_too_long(product: Product) -> None:
    assert not (found := long_files(product)), "\n".join(found)


def test_few_small_modules_have_a_single_user(product: Product) -> None:
    found = small_modules(product)
    assert len(found) <= MAX_SMALL_MODULES, "move some into their users:\n" + "\n".join(found)


def test_no_two_modules_share_a_name_without_a_reason(product: Product) -> None:
    assert not (found := misleading_names(product)), "\n".join(found)


# ── the checks themselves ────────────────────────────────────────────────────────────────────────────────────────────
def planted(root: Path, files: Mapping[str, str]) -> Product:
    """Write ``files`` (text by path), with an ``__init__.py`` in each of their folders."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(root).parents:
            (root / folder / "__init__.py").touch()
    return Product(root)


@pytest.mark.parametrize(
    "line",
    [
        "from .b import f",
        "from . import b",
        "from rrl.core.b import f",
        "import rrl.core.b",
        "def g():\n    from .b import f",
        "if TYPE_CHECKING:\n    from .b import f",
    ],
)
def test_a_circle_of_modules_is_found_and_named(tmp_path: Path, line: str) -> None:
    product = planted(tmp_path, {"core/a.py": line, "core/b.py": "\nfrom .a import g"})
    [found] = module_circles(product)
    assert "circle of rrl.core.a, rrl.core.b" in found
    assert "core/b.py:2 imports core.a" in found


def test_a_circle_of_sub_packages_is_found_without_one_of_modules(tmp_path: Path) -> None:
    files = {
        "health/x/a.py": "from ..y.b import f",
        "health/y/b.py": "",
        "health/y/c.py": "from ...health.x import d",
        "health/x/d.py": "",
    }
    product = planted(tmp_path, files)
    assert module_circles(product) == []
    [found] = package_circles(product)
    assert "circle of rrl.health.x, rrl.health.y" in found
    assert "health/y/c.py:1 imports health.x.d" in found


def test_a_file_that_is_one_line_too_long_is_found(tmp_path: Path) -> None:
    product = planted(tmp_path, {"core/a.py": "pass\n" * MAX_LINES, "core/b.py": "pass\n" * (MAX_LINES + 1)})
    [found] = long_files(product)
    assert found.startswith("core/b.py has 701 lines")


def test_a_small_module_of_a_single_user_is_found(tmp_path: Path) -> None:
    files = {
        "core/a.py": "from . import b, c, d, e\n",
        "core/b.py": "from . import e\n" + "pass\n" * (SMALL_LINES - 1),
        "core/c.py": "pass\n" * (SMALL_LINES + 1),
        "core/d.py": '"""Nothing."""\n',
        "core/e.py": "pass\n",
    }
    assert small_modules(planted(tmp_path, files)) == [f"core/b.py ({SMALL_LINES}) for rrl.core.a"]


def test_a_name_of_two_modules_without_a_reason_is_found(tmp_path: Path) -> None:
    product = planted(tmp_path, {"core/thing.py": "", "roles/thing.py": "", "core/main.py": "", "roles/main.py": ""})
    found = misleading_names(product)
    assert found[0].startswith("core/thing.py and roles/thing.py have the same name")
    assert "base in REPEATED_NAMES is not repeated any more: remove it from REPEATED_NAMES" in found
    assert not [line for line in found if line.startswith("main ")]
