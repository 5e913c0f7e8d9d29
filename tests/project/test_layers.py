"""Layers of the product import only lower layers, the core is pure, and commands import no heavy package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUBPACKAGES = ("api", "cli", "cluster", "config", "core", "health", "manager", "roles", "slurm_templates", "transport")
LINT = Path(sys.executable).with_name("lint-imports")


def lint(root: Path, source: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "300"}
    if source is not None:
        env["PYTHONPATH"] = str(source)
    return subprocess.run(
        [LINT, "--config", ROOT / "pyproject.toml", "--no-cache"],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


PLANTED = (
    ("manager/intake/reconcile.py", "import rrl.roles.launcher.step", "rrl.manager is not allowed to import rrl.roles"),
    ("core/types.py", "import rrl.manager.model.state", "rrl.core is not allowed to import rrl.manager"),
    (
        "health/detection/attribution/wait_chains.py",
        "import rrl.transport.keys",
        "rrl.health is not allowed to import rrl.transport",
    ),
    ("manager/planner/capacity/allocations.py", "import time", "rrl.manager.planner is not allowed to import time"),
    ("manager/model/state.py", "import asyncio", "rrl.manager.model is not allowed to import asyncio"),
    (
        "manager/planner/deadlines.py",
        "import rrl.manager.intake.admission",
        "rrl.manager.planner is not allowed to import rrl.manager.intake",
    ),
    (
        "health/checks/xid.py",
        "import rrl.health.detection.health_monitor",
        "rrl.health.checks is not allowed to import rrl.health.detection",
    ),
    (
        "roles/worker/api.py",
        "import rrl.roles.node_agent.stack_dumps",
        "rrl.roles.worker is not allowed to import rrl.roles.node_agent",
    ),
    (
        "transport/streams/framing.py",
        "import rrl.transport.weights.manifest",
        "rrl.transport.streams is not allowed to import rrl.transport.weights",
    ),
)
"""Imports that break the rules: the module, the line that is added to it, and the message of lint-imports."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of lint-imports for a copy of the package to which every import of ``PLANTED`` was added."""
    folder = tmp_path_factory.mktemp("planted")
    house = folder / "rrl"
    house.mkdir()
    shutil.copy(ROOT / "__init__.py", house)
    for subpackage in SUBPACKAGES:
        shutil.copytree(ROOT / subpackage, house / subpackage, ignore=shutil.ignore_patterns("__pycache__"))
    first = "from __future__ import annotations\n"
    for where, line, _ in PLANTED:
        text = (house / where).read_text()
        assert first in text
        (house / where).write_text(text.replace(first, f"{first}{line}\n"))
    checked = lint(folder, folder)
    assert checked.returncode == 1
    return checked.stdout


def test_every_import_goes_downwards_and_the_core_is_pure() -> None:
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(("where", "line", "named"), PLANTED)
def test_an_import_that_breaks_the_rules_is_found_and_named(findings: str, where: str, line: str, named: str) -> None:
    importer = f"rrl.{where.removesuffix('.py').replace('/', '.')}"
    assert f"{importer} -> {line.removeprefix('import ')}" in findings
    assert named in findings


def test_root_holds_no_code_and_no_package_has_a_modules_name() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert not folders & set(sys.stdlib_module_names)


_HEAVY = ("numpy", "torch", "transformers", "vllm", "ucxx", "reasoning_gym")


@pytest.mark.parametrize(
    "module",
    ["rrl", "rrl.manager.runtime", "rrl.manager.bootstrap.start", "rrl.config.job.schema", "rrl.cli.job.check"],
)
def test_command_on_a_login_node_imports_no_heavy_package(module: str) -> None:
    assert not _loaded_by(module) & set(_HEAVY)


@pytest.mark.parametrize("module", ["rrl.manager.runtime", "rrl.manager.bootstrap.start"])
def test_a_manager_starts_without_pydantic_and_jinja2(module: str) -> None:
    assert not _loaded_by(module) & {"pydantic", "jinja2"}


@pytest.mark.parametrize("module", ["rrl.manager.storage.journal", "rrl.manager.model.state"])
def test_a_status_needs_neither_pydantic_nor_sockets(module: str) -> None:
    assert not _loaded_by(module) & {*_HEAVY, "pydantic", "zmq", "submitit", "asyncio"}


def _loaded_by(module: str) -> set[str]:
    code = f"import {module}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())
