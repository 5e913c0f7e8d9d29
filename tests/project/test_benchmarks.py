"""A benchmark that cannot run on this machine reports the reason in one line, before any benchmark has begun."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from rrl.benchmarks import (
    _provenance,
    _requirements,
    code_lines,
    elastic,
    looks,
    manager_away,
    restart,
    slurm_reads,
    takeover,
    track,
)
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import NEEDS, Need
from rrl.tests.support.slurm import lab as slurm

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _keeps_the_sigterm_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requirements, "exit_on_sigterm", lambda: None)


def _without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "missing", lambda: ["slurmctld", "munged"])


def test_every_benchmark_names_its_needs_and_checks_them() -> None:
    programs = {path.stem: path.read_text() for path in BENCHMARKS.glob("[a-z]*.py")}
    assert set(programs) == set(NEEDS)
    assert [name for name, text in programs.items() if f'check_requirements("{name}"' not in text] == []


def test_the_last_line_of_every_benchmark_says_where_its_figures_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_provenance, "RESULTS", tmp_path)
    texts = {path.stem: path.read_text() for path in BENCHMARKS.glob("[a-z]*.py")}
    says = re.compile(r"\b(provenance|last_line|measure_parts)\(")
    assert [name for name, text in texts.items() if not says.search(text)] == []
    line = json.loads(last_line("example", {"wait_s": 2.0}, {"wait_s": [1.0, 3.0, 2.0]}, {"folder": "/tmp"}))
    assert (line["wait_s"], line["ranges"]) == (2.0, {"wait_s": [1.0, 3.0]})
    assert line.keys() >= {"commit", "cores", "load", "raw"}
    assert json.loads(Path(line["raw"]).read_text())["samples"] == {"wait_s": [1.0, 3.0, 2.0], "folder": "/tmp"}


def test_the_plots_were_drawn_from_the_samples_beside_them() -> None:
    samples, *plots = sorted((ROOT / "docs" / "benchmarks").iterdir(), key=lambda path: path.suffix)
    assert (samples.name, len(plots)) == ("ettr.json", 4)
    source = f"<dc:source>ettr.json, SHA-256 {hashlib.sha256(samples.read_bytes()).hexdigest()}</dc:source>"
    remedy = f"run .venv/bin/python -m rrl.benchmarks._ettr_plots {samples} {samples.parent}"
    assert [path.name for path in plots if source not in path.read_text()] == [], remedy


def test_looks_track_and_slurm_reads_report_the_agreed_figures() -> None:
    blocks = [slurm_reads.Block(reader, 1.0, 1.0, [0.5]) for reader in ("commands", "pyslurm")]
    assert set(looks.FIGURES) >= {"status_s", "explain_s"}
    assert {*itertools.chain(*track.FIGURES.values())} >= {"steps", "missing", "doubled", "step_time_ratio"}
    assert set(slurm_reads.figures_of(blocks, 0.1)) >= {
        "commands_cpu_ms",
        "pyslurm_cpu_ms",
        "commands_ms",
        "pyslurm_ms",
        "loop_gap_s",
    }


def test_code_lines_count_statements_and_no_docstring_however_they_are_formatted() -> None:
    module = '"""Docstring\nof two lines."""\nLIMIT = 3\n"""In s."""\n\n# comment\nf(\n    1,\n    2,\n)\n'
    files = {
        "pyproject.toml": '[tool.setuptools]\npackages = ["rrl", "rrl.core"]',
        "core/a.py": module,
        "core/b.py": "if x: y()\n",
        "tests/core/test_a.py": module,
        "examples/a.py": module,
        "docs/a.md": "one\n\nthree\n",
    }
    assert code_lines.count(files) == {"product": 3, "product core": 3, "tests": 2, "docs": 3}


@pytest.mark.parametrize(("seconds", "node_s"), [(110, 0), (100, 0), (90, 50), (70, 150), (60.2, 199), (50, 200)])
def test_node_hours_of_a_fixed_pool_of_the_same_speed_are_interpolated(seconds: float, node_s: float) -> None:
    fixed = [(100.0, 0.0), (80.0, 100.0), (60.0, 200.0), (60.5, 400.0)]  # the largest pool is no faster
    assert elastic.node_s_of_same_speed(fixed, seconds) == pytest.approx(node_s)


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


@pytest.mark.parametrize("benchmark", [restart, manager_away, takeover])
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
        "benchmarks/ettr.py",
        "benchmarks/manager_away.py",
        "benchmarks/restart.py",
        "benchmarks/slurm_reads.py",
        "benchmarks/takeover.py",
    }


def test_missing_module_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = _requirements.unmet("weights", [Need.UCX])
    assert line == (
        "benchmarks/weights.py needs UCX: Python's ucxx is not installed; to install it: make setup "
        "(or pip install '.[ucx]'); without it: --part namespaces --kind tcp"
    )


def test_parts_whose_model_was_not_made_end_with_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    benchmark = importlib.import_module("rrl.benchmarks.agents")
    monkeypatch.setattr(benchmark, "check_requirements", lambda _: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(_requirements, "_MISSING", {**_requirements._MISSING, Need.VLLM: lambda: None})
    monkeypatch.setattr(sys, "argv", ["agents.py", "--part", "overhead"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"benchmarks/agents.py: {tmp_path}")
    assert line.endswith("make smollm2")
