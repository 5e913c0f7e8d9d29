"""The origin of a benchmark's figures, and the file of its raw samples (benchmarks/_provenance.py)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rrl.benchmarks import _provenance
from rrl.benchmarks._provenance import provenance, raw_samples, spread

CHECKOUT = Path(__file__).parents[3]


def test_raw_samples_are_written_with_their_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_provenance, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(_provenance, "commit", lambda: "abc123+")
    path = raw_samples("restart", [{"arm": "warm", "seconds": 0.5}])
    written = json.loads(path.read_text())
    assert path.name.startswith("restart-abc123+-")
    assert (written["benchmark"], written["samples"]) == ("restart", [{"arm": "warm", "seconds": 0.5}])
    assert set(provenance()) < set(written)
    assert written["cores"] > 0
    assert len(written["load"]) == 2
    assert written["versions"]["rrl-slurm"]


def test_later_samples_of_a_benchmark_replace_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_provenance, "RESULTS", tmp_path)
    path = raw_samples("ettr", [1])
    assert raw_samples("ettr", [1, 2], path) == path
    assert json.loads(path.read_text())["samples"] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="no checkout")
def test_raw_samples_are_ignored_by_git() -> None:
    path = _provenance.RESULTS / "restart-abc123-20261126T120000Z.json"
    assert subprocess.run(["git", "check-ignore", "-q", str(path)], cwd=CHECKOUT).returncode == 0
    assert _provenance.commit()


def test_spread_has_median_range_and_count() -> None:
    assert spread([3.0, 1.0, 2.5]) == {"median": 2.5, "range": [1.0, 3.0], "samples": 3}
