"""The jobs of docs/tags.md are valid, and are the layouts that the page calls them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.types import TRAINER, role_of

PAGE = Path(__file__).parents[4] / "docs" / "tags.md"


def test_jobs_of_the_page_are_the_three_layouts_on_as_many_nodes() -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    specs = [resolve(Job.model_validate(tomllib.loads(block)), "/venv/bin/python") for block in blocks]
    found = {
        spec.name: (spec.guests, spec.role("rollout").replicas, spec.role(role_of(TRAINER)).nodes) for spec in specs
    }
    assert found == {"disaggregated": (0, 2, 2), "multiplexed": (2, 2, 2), "colocated": (4, 0, 4)}
    assert {(spec.nodes, spec.spares) for spec in specs} == {(5, 1)}
