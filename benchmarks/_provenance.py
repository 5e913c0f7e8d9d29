"""Records the machine and versions with which the figures of a benchmark were measured, and keeps their raw samples.

The last line that a benchmark prints is one JSON object: its figures with their ranges (:func:`spread`), what
:func:`provenance` returns, and ``raw``, the path of the file in which :func:`raw_samples` has written the single
samples. git ignores these files.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rrl-slurm", "torch", "ucxx-cu13", "vllm")
"""Packages whose versions are part of the provenance if they are installed."""
_LOAD_AT_START = os.getloadavg()[0]
"""Load of this machine (1 minute) when this module was imported, before the measurement."""


def provenance() -> dict[str, Any]:
    """Return the machine and versions with which the figures were measured; call it after the measurement.

    ``load`` is the load of this machine (1 minute) at the start and now. It includes the benchmark itself.
    """
    return {
        "commit": commit(),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in (_LOAD_AT_START, os.getloadavg()[0])],
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def raw_samples(name: str, samples: Any, path: Path | None = None) -> Path:
    """Write the samples of a benchmark (JSON values), with their provenance, to a file; return its path.

    A long benchmark calls this after each sample, with the path that the first call has returned.
    """
    RESULTS.mkdir(exist_ok=True)
    origin = provenance()
    if path is None:
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = RESULTS / f"{name}-{origin['commit'] or 'no-commit'}-{now}.json"
    path.write_text(json.dumps({"benchmark": name, **origin, "samples": samples}) + "\n")
    return path


def last_line(
    name: str,
    figures: Mapping[str, float | None],
    samples: Mapping[str, Sequence[float]],
    further: Mapping[str, Any] | None = None,
) -> str:
    """Keep the samples of a benchmark in a file, and return the line with its figures, their ranges and the provenance.

    Args:
        name: Name of the benchmark.
        figures: The figures, by name; None for a figure that was not measured.
        samples: The samples of each figure that has several.
        further: Other samples to keep, as JSON values.
    """
    raw = raw_samples(name, {**samples, **(further or {})})
    ranges = {figure: spread(values)["range"] for figure, values in samples.items()}
    return json.dumps({**figures, "ranges": ranges, **provenance(), "raw": str(raw)})


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the range (lowest and highest value) and the number of values."""
    return {
        "median": round(statistics.median(values), 4),
        "range": [round(min(values), 4), round(max(values), 4)],
        "samples": len(values),
    }


def commit() -> str:
    """Return the commit of this checkout, with ``+`` if files differ from the commit; empty outside of a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
