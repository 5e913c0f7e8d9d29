"""The product asks for the traits of a cluster and never for its name."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rrl.benchmarks._cluster_questions import cluster_questions, question_lines
from rrl.cluster.traits import CLUSTERS, ClusterName

ROOT = Path(__file__).parents[2]


def test_product_has_no_question_for_the_name_of_a_cluster() -> None:
    asked = cluster_questions(ROOT)
    assert not asked, f"{asked} ask for a cluster's name; ask for one of its traits (cluster/traits.py)"


def test_job_accepts_exactly_the_clusters_of_the_table() -> None:
    assert get_args(ClusterName) == tuple(CLUSTERS)


@pytest.mark.parametrize(
    "source",
    [
        'if job.cluster == "slurm": pass',
        'here = "local" != spec.cluster',
        'here = job.cluster.kind in ("slurm", "other")',
        'match job.cluster:\n    case "other" | "local": pass',
        'SITES = {"local": 1, "slurm": 2}',
        'KIND = "slurm"',
    ],
)
def test_question_for_a_name_is_found(source: str) -> None:
    assert list(question_lines(source))


@pytest.mark.parametrize(
    "source", ['def key(): return ("slurm", name)', 'run(kind="slurm")', 'READERS = {"slurm": 1, "host": 2}']
)
def test_name_that_is_no_question_is_not_found(source: str) -> None:
    assert not list(question_lines(source))
