"""Fixtures that several folders share."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.listening_manager import Lab, lab
from rrl.tests.support.slurm import netns
from rrl.tests.support.slurm.lab import SlurmLab, missing
from rrl.tests.support.supervisor import SIGTERM_EXIT_CODE, exit_on_sigterm

# removed, because pytest-xdist sets it, and rrl would wrap output that goes to no terminal
os.environ.pop("COLUMNS", None)
os.environ.pop(RUNS_ENV, None)  # removed, so that no test acts on the developer's own runs
LAB_NODES = 5
REQUIRED = "RRL_REQUIRE_SLURM"
_LABS = {"slurm_lab", "accounting_lab", "isolated_lab", "preempting_lab"}
_MARK = "pytest.mark.slurm"
_NETWORK_FILES = ["integration/slurm/lab/test_isolated_nodes.py", "integration/slurm/test_cut_nodes.py"]
collect_ignore = [] if netns.possible() else _NETWORK_FILES
"""Test files that are not collected without root, because they give each node a network of its own."""
LONG_FILES = (
    "unit/roles/trainer/test_gang.py",
    "integration/local/test_runs.py",
    "integration/slurm/cluster/test_cluster.py",
    "integration/local/test_agents.py",
    "integration/local/test_lending.py",
    "integration/local/test_faults.py",
    "integration/local/test_quickstart.py",
    "integration/slurm/test_runs.py",
    "integration/local/test_resume.py",
    "integration/local/test_manager_away.py",
    "integration/local/test_bring_your_own.py",
    "integration/local/test_built_in_trainer.py",
    "unit/transport/weights/test_ucx_apart.py",
    "integration/slurm/test_health_hooks.py",
    "security/test_run_under_attack.py",
    "integration/local/test_submit_interrupted.py",
    "security/test_listening_sockets.py",
    "integration/slurm/test_doctor.py",
    "integration/local/test_own_code.py",
    "integration/local/test_evaluation.py",
    "integration/local/test_input_files.py",
    "integration/local/test_stream.py",
    "integration/local/test_environment.py",
    "integration/slurm/test_submit_interrupted.py",
    "integration/slurm/lab/test_supervisor.py",
    "integration/slurm/cluster/test_readers.py",
    "unit/roles/node_agent/test_node_monitor.py",
    "integration/local/test_outside_agents.py",
    "integration/local/test_standby.py",
    "integration/local/test_user_code.py",
    "integration/local/test_second_rollouts.py",
    "integration/local/test_checkpoint_every.py",
    "integration/local/test_python_api.py",
    "integration/local/test_node_health.py",
    "integration/slurm/test_all_cancelled.py",
    "unit/health/readers/test_dcgm.py",
    "security/test_default_run.py",
    "unit/cli/health/test_report.py",
    "unit/cluster/test_local.py",
    "integration/local/test_idle_shares.py",
    "unit/manager/test_crash_points.py",
    "unit/health/detection/test_scenarios.py",
)
"""Files that take longest on two cores, the longest first. They start first, because pytest-xdist gives a whole file to
one worker: a long file that starts last leaves the other workers without work."""
_TOGETHER = "tests/unit/roles/trainer/"
"""Folder whose files go to one worker, because they fork trainer processes from a process that has loaded torch."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of all runs of the commands that the test calls; it is empty."""
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv(RUNS_ENV, str(runs))
    return runs


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Lab]:
    """Return a run directory with keys, for tests of launchers and agents."""
    with lab(tmp_path) as at:
        yield at


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """Return an event loop for the test and the fixtures that it shares the loop with."""
    with asyncio.Runner() as runner:
        yield runner


def pytest_sessionstart() -> None:
    """Let SIGTERM end the session as Ctrl-C does, so that fixtures are torn down."""
    exit_on_sigterm(lambda: pytest.exit("SIGTERM", returncode=SIGTERM_EXIT_CODE))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function: by its fixture ``runner``, or in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    runner = pyfuncitem.funcargs.get("runner")
    (runner.run if isinstance(runner, asyncio.Runner) else asyncio.run)(test)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while modules are imported, and exempt their objects from it later.

    The imports create a million objects, which every later collection would have to visit.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the files that need Slurm with ``-m 'slurm and …'``; all files take a worker 20 s."""
    wanted = str(config.option.markexpr)
    only_slurm = wanted.split(" ")[0] == "slurm" and " or " not in wanted
    if only_slurm and collection_path.match("test_*.py") and not _names_slurm(collection_path):
        return True
    return None


@functools.cache
def _names_slurm(path: Path) -> bool:
    """Return whether a test module's source contains the name of a lab fixture or the Slurm marker."""
    text = path.read_text()
    return any(name in text for name in (*_LABS, _MARK))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that uses a lab as a test that needs Slurm, and put long files first."""
    for item in items:
        if isinstance(item, pytest.Function) and _LABS & set(item.fixturenames):
            item.add_marker(pytest.mark.slurm)
        if item.get_closest_marker("slurm") and not _names_slurm(item.path):
            raise pytest.UsageError(f"{item.nodeid} needs Slurm, but {item.path.name} names neither {_MARK} nor a lab")
    rank = {Path(__file__).parent / name: place for place, name in enumerate(LONG_FILES)}
    if gone := [str(file) for file in rank if not file.exists()]:
        raise pytest.UsageError(f"LONG_FILES names files that do not exist: {', '.join(gone)}")
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files with ``--dist loadfile``, and one worker all files of :data:`_TOGETHER`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _TOGETHER if nodeid.startswith(_TOGETHER) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a test was skipped although Slurm is required, as it is in CI."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(REQUIRED) and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    """Yield a real Slurm of five nodes of 8 CPUs, 8000 MiB and 2 fake GPUs, for the whole session.

    Jobs are submitted as its plain user. Each test calls ``lab.clear()``, which leaves the lab idle. Where Slurm is not
    installed the test is skipped, or fails if RRL_REQUIRE_SLURM is set.
    """
    _require()
    with SlurmLab.start(nodes=LAB_NODES, gpus=2) as lab:
        yield lab


@pytest.fixture(scope="session")
def accounting_lab() -> Iterator[SlurmLab]:
    """Yield a lab like ``slurm_lab``, with two nodes without GPUs, and with slurmdbd.

    Slurm enforces accounts, QOS and limits there.
    """
    _require(accounting=True)
    with SlurmLab.start(nodes=2, accounting=True) as lab:
        yield lab


@pytest.fixture(scope="session")
def preempting_lab() -> Iterator[SlurmLab]:
    """Yield a lab like ``slurm_lab``, without GPUs, whose partitions allow preemption.

    Slurm preempts the jobs of some partitions after a grace of 6 s. In other partitions, it suspends the jobs in turn.
    """
    _require()
    with SlurmLab.start(nodes=LAB_NODES, preempting=6) as lab:
        yield lab


@pytest.fixture(scope="session")
def isolated_lab() -> Iterator[SlurmLab]:
    """Yield a lab like ``slurm_lab``, without GPUs, in which each node has a network of its own.

    Only the files in :data:`collect_ignore` use it.
    """
    _require()
    with SlurmLab.start(nodes=LAB_NODES, isolated=True) as lab:
        yield lab


def _require(accounting: bool = False) -> None:
    if absent := missing(accounting=accounting):
        reported = f"not installed: {', '.join(absent)} (python -m rrl.tests.support.slurm.lab install --accounting)"
        if os.environ.get(REQUIRED):
            pytest.fail(reported)
        pytest.skip(reported)
