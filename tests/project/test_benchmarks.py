"""A benchmark that cannot run on this machine reports the reason in one line, before any benchmark has begun."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rrl.benchmarks import _requirements, manager_away, restart
from rrl.benchmarks._requirements import NEEDS, Need
from rrl.tests.support.slurm import lab as slurm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _keeps_the_sigterm_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "exit_on_sigterm", lambda: None)


def _without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: ["slurmctld", "munged"])


def test_every_benchmark_names_its_needs_and_checks_them() -> None:
    programs = {path.stem: path.read_text() for path in BENCHMARKS.glob("[a-z]*.py")}
    assert set(programs) == set(NEEDS)
    assert [name for name, text in programs.items() if f'check_requirements("{name}"' not in text] == []


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--no-such-option", 2)])
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_benchmark_reads_its_options_before_it_begins(
    name: str, option: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module(f"rrl.benchmarks.{name}")
    monkeypatch.setattr(benchmark, "check_requirements", lambda *_, **__: pytest.fail("the benchmark has begun"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", option])
    with pytest.raises(SystemExit) as ended:
        getattr(benchmark, "app", benchmark.main)()
    out, err = capsys.readouterr()
    shown = out if code == 0 else err
    assert (ended.value.code, shown.lower().lstrip().startswith("usage: ")) == (code, True)
    if code == 0:
        first_line = (benchmark.__doc__ or "").splitlines()[0]
        assert " ".join(first_line.split()) in " ".join(shown.split())


@pytest.mark.parametrize("benchmark", [restart, manager_away])
def test_benchmark_without_slurm_ends_with_one_line_and_exit_code_2(
    benchmark: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_slurm(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()  # type: ignore[attr-defined]
    out, err = capsys.readouterr()
    name = benchmark.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    assert (ended.value.code, out) == (2, "")
    assert err == (
        f"benchmarks/{name}.py needs Slurm: not installed: slurmctld, munged; to install it: make slurm; "
        "without it: --cluster local\n"
    )


def test_options_that_need_no_requirement_do_not_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_slurm(monkeypatch)
    _requirements.check_requirements("restart", without=(Need.SLURM,))


def test_all_needs_are_checked_before_the_first_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_slurm(monkeypatch)
    assert _requirements.main() == 2
    lines = capsys.readouterr().err.splitlines()
    assert {line.split()[0] for line in lines if "needs Slurm" in line} == {
        "benchmarks/ettr.py", "benchmarks/manager_away.py", "benchmarks/restart.py", "benchmarks/slurm_reads.py",
    }  # fmt: skip


def test_missing_module_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = _requirements.unmet("weights", [Need.UCX])
    assert line == (
        "benchmarks/weights.py needs UCX: Python's ucxx is not installed; to install it: make setup "
        "(or pip install '.[ucx]'); without it: --part namespaces --kind tcp"
    )
