"""The parts of a benchmark, of which each measures some of its figures in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._table import print_bars
from rrl.tests.support.supervisor import temporary_runs_folder

Figures = dict[str, Any]
Samples = dict[str, list[float]]
Measure = Callable[[Path], tuple[Figures, Samples]]
"""Measures a part in a folder: returns its figures, and the samples of those that have several."""


def measure_parts(
    name: str, parts: Iterable[Measure], bars: Mapping[str, float | None], at_least: Collection[str]
) -> None:
    """Measure the parts of the benchmark ``name``, and print its figures and its last line.

    Args:
        bars: The bar of each figure; None for a figure without one.
        at_least: Figures whose bar is a minimum.
    """
    figures: Figures = {}
    samples: Samples = {}
    for measure in parts:
        with temporary_runs_folder() as folder:
            found, of_part = measure(folder)
        figures |= found
        samples |= of_part
    print_bars(figures, bars, at_least)
    print(last_line(name, {figure: figures.get(figure) for figure in bars}, samples))
