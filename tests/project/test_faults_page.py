"""docs/faults.md agrees with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rrl.config.job.faults import FaultsTable
from rrl.config.job.resolve import MAX_RANDOM_FAULTS
from rrl.core.faults import FAULT_TRAITS, MANAGER, SUPPORT_ROLE_KINDS, FaultKind, FaultTraits
from rrl.health.detection.detectors.registry import NODE_DETECTORS, PROGRESS_DETECTORS
from rrl.manager.execute.fault_injection import MAX_FILL_BYTES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's table, by kind of fault."""
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {kind: [cell.strip() for cell in rest.split("|")] for kind, rest in found}


def needs(traits: FaultTraits) -> str:
    seconds = "seconds" if traits.needs_seconds else "seconds, unless it is permanent" if traits.takes_seconds else ""
    return "; ".join(filter(None, ("amount" if traits.amount else "", seconds))) or "–"


def test_every_fault_kind_has_a_row_in_the_order_of_the_enum() -> None:
    assert list(rows()) == [kind.value for kind in FaultKind]


@pytest.mark.parametrize("kind", FaultKind)
def test_row_of_the_page_agrees_with_the_traits(kind: FaultKind) -> None:
    _, target, needed, effect, _ = rows()[kind.value]
    traits = FAULT_TRAITS[kind]
    assert (target, needed, effect) == (traits.target_kind.value, needs(traits), traits.effect.value)


def test_page_names_agents_and_the_manager_as_targets_of_their_kinds() -> None:
    done = {kind: cells[0] for kind, cells in rows().items()}
    assert {kind for kind, text in done.items() if "`agent/NODE`" in text} == {
        kind.value for kind in SUPPORT_ROLE_KINDS
    }
    assert [kind for kind, text in done.items() if f"`{MANAGER}`" in text] == ["kill"]


def test_detectors_named_on_the_page_exist() -> None:
    names = {detector.__name__ for detector in (*PROGRESS_DETECTORS, *NODE_DETECTORS)}
    named = {name for cells in rows().values() for name in re.findall(r"`([a-z]+_[a-z]+)`", cells[-1])}
    assert named
    assert named <= names


def test_numbers_and_example_of_the_page_match_the_code() -> None:
    text = PAGE.read_text()
    assert f"more than {MAX_FILL_BYTES // 2**30} GiB is free" in text
    assert f"at most {MAX_RANDOM_FAULTS}" in text
    (example,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    table = FaultsTable.model_validate(tomllib.loads(example)["faults"])
    assert (len(table.planned), len(table.random)) == (1, 1)


def test_reference_of_the_job_spec_refers_to_the_faults_page() -> None:
    assert "docs/faults.md" in Path(ROOT / "config" / "job" / "faults.py").read_text()
