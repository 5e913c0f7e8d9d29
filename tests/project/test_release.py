"""Sdist and wheel have the right content and page, and an rrl installed from the wheel works without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.docs import make_release
from rrl.tests.support import pythons
from rrl.tests.support.runs import check_records

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/team/rrl"
DATA = {".csv", ".j2", ".json", ".typed"}
"""Suffixes of the files that a wheel needs besides Python.

The product reads them; only py.typed is for type checkers.
"""
Rrl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the paths of the sdist and the wheel."""
    sdist, wheel = make_release.build(REPOSITORY, tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(built[1]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_installs_nothing_but_rrl_and_its_dist_info(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"rrl", f"rrl_slurm-{make_release.version()}.dist-info"}


def test_the_wheel_has_py_typed_and_every_data_file(built: tuple[Path, Path]) -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    files = [ROOT / "py.typed", *(path for folder in folders for path in folder.rglob("*") if path.suffix in DATA)]
    data = {f"rrl/{path.relative_to(ROOT)}" for path in files if path.relative_to(ROOT).parts[0] != "tests"}
    with zipfile.ZipFile(built[1]) as wheel:
        shipped = set(wheel.namelist())
    assert len(data) >= 7
    assert data <= shipped, f"files that the wheel lacks: {sorted(data - shipped)}"


def test_the_sdist_has_the_sources_the_license_and_no_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "cli/main.py", "slurm_templates/allocation.sbatch.j2"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples", "docs", "."))]


def test_an_index_shows_links_classifiers_and_pictures(metadata: Message) -> None:
    links = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert links["Repository"] == REPOSITORY
    assert all(link.startswith(REPOSITORY) for link in links.values())
    named = "Programming Language :: Python :: "
    shown = [each.removeprefix(named) for each in metadata.get_all("Classifier", []) if each.startswith(named)]
    assert (shown, metadata["Requires-Python"]) == (["3.11", *pythons.VERSIONS], "<3.14,>=3.11")
    page = str(metadata.get_payload())
    assert f"]({REPOSITORY}/raw/v{make_release.version()}/docs/status.svg)" in page
    assert f"]({REPOSITORY}/blob/v{make_release.version()}/docs/job.md)" in page
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", page) == []


@pytest.mark.parametrize("given", ["/nowhere/python3.13", "/bin/true"])
def test_make_setup_without_a_python_that_rrl_supports_is_one_line(tmp_path: Path, given: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={given}"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": os.defpath}
    )
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith(("make: ", "find: "))]
    assert line.startswith(f"make setup needs Python 3.11, 3.12 or 3.13 with venv; {given} is no such Python: ")
    assert (done.returncode, (tmp_path / ".venv").exists()) == (2, False)


def test_the_changelog_keeps_its_form_and_names_the_version_once_it_is_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[([^\]]+)\](?: - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == len(releases)
    assert releases[0] == "Unreleased"
    assert releases[1:2] in ([], [make_release.version()]), "the newest release is not the version of pyproject.toml"
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert len(kinds) == len(set(kinds)) or len(releases) > 1, "the changelog has a section of a release twice"


# ── installation ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def rrl(built: tuple[Path, Path], folder: Path) -> Rrl:
    """Return a function that calls the rrl of the wheel, outside of the repository and without Slurm on PATH.

    The wheel is installed in a separate environment. Its module path ends with the packages of the test's environment,
    because rrl requires them.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(built[1])], check=True)
    [site] = (folder / "venv/lib").glob("python3*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RRL_", "PYTHON", "SLURM"))}
    env |= {"PATH": str(folder / "venv/bin"), RUNS_ENV: str(folder / "runs")}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "venv/bin/rrl"), *arguments]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)

    return call


def test_an_installed_rrl_makes_and_checks_a_job_outside_of_the_clone(rrl: Rrl) -> None:
    assert rrl("--version").stdout == f"rrl {make_release.version()}\n"
    made = rrl("init")
    assert made.returncode == 0, made.stderr
    checked = rrl("check", "job.toml", "--no-task")
    assert checked.returncode == 0, checked.stderr
    assert "local" in checked.stdout


@pytest.mark.torch
@pytest.mark.long  # the installed rrl of the test above checks a job; the same example trains in tests/integration
def test_an_installed_rrl_trains_and_exports_a_model(rrl: Rrl, folder: Path) -> None:
    rrl("init", "--force")
    smallest = ("cluster.spares=0", "roles.trainer.warm=false", "roles.rollout.replicas=1")
    sets = [word for setting in ("run.steps=3", "faults.planned=[]", *smallest) for word in ("--set", setting)]
    ended = rrl("submit", "job.toml", *sets, "--wait")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    (run,) = (folder / "runs").glob("quick*")
    check_records(RunDir(run))
    exported = rrl("export", "quick", "model")
    assert exported.returncode == 0, exported.stderr
    assert "step 3" in exported.stdout
