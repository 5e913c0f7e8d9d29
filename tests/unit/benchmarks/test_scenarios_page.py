"""The examples in scenarios.md work, and the page has every key, every word and the default phases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rrl.benchmarks.scenarios.event_kinds import KEYS
from rrl.benchmarks.scenarios.format import (
    ClusterTable,
    Event,
    KernelKind,
    QueueTable,
    RhythmPhase,
    RoleTable,
    Scenario,
    Truth,
)
from rrl.benchmarks.scenarios.load import load
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.play import play
from rrl.benchmarks.scenarios.rhythms import DEFAULT_ROLES, loads_of, roles_of
from rrl.benchmarks.scenarios.validation import ALLOWED_VALUES

PAGE = (Path(__file__).parents[3] / "benchmarks" / "scenarios" / "scenarios.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
DEFAULTS = next(text for text in EXAMPLES if "[roles.trajectories]" in text)


def example(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "example.toml"
    file.write_text(text if "about = " in text else f'about = "An example of the page"\nlasts = "20min"\n{text}')
    return load(file)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.strip().splitlines()[0][:60])
def test_every_example_has_the_expected_findings_and_no_other(tmp_path: Path, text: str, seed: int) -> None:
    scenario = example(tmp_path, text)
    played = play("example", scenario, seed, judge_of(OURS, scenario))
    assert ([one for one in played.outcomes if not one.in_time], played.false, played.broken) == ([], (), "")


def test_default_phases_and_their_loads_are_those_of_the_page(tmp_path: Path) -> None:
    def described(role: RoleTable, given: bool) -> list[object]:
        phases = [
            (
                phase.model_copy(update={"cpu": None, "gpu": None, "tensor": None}),
                (phase.cpu or 0.0, phase.gpu or 0.0, phase.tensor or 0.0) if given else loads_of(phase)[:3],
            )
            for phase in (*(role.once or ()), *role.rhythm)
        ]
        return [role.replicas, role.gpus, len(role.once or ()), *phases]

    (tmp_path / "none.toml").write_text('about = "x"\n')
    used = roles_of(load(tmp_path / "none.toml"))
    on_the_page = roles_of(example(tmp_path, DEFAULTS))
    assert {name: described(role, True) for name, role in on_the_page.items()} == {
        name: described(role, False) for name, role in used.items()
    }
    assert set(example(tmp_path, DEFAULTS).roles) == set(DEFAULT_ROLES)


def test_the_page_has_every_key_of_every_table() -> None:
    tables = (Scenario, ClusterTable, RoleTable, RhythmPhase, QueueTable, Truth)
    keys = {field.alias or name for table in tables for name, field in table.model_fields.items()}
    keys |= {key for keys_of_one in KEYS.values() for key in keys_of_one} | KEYS.keys()
    keys |= {field.alias or name for name, field in Event.model_fields.items()} - {"by_readers"}
    keys -= {"event", "truth", "cpus"}
    assert not sorted(key for key in keys if not re.search(rf"[`\[]{key}\b", PAGE))


def test_page_has_every_allowed_value_of_a_reader() -> None:
    words = {word for words in ALLOWED_VALUES.values() for word in words} | set(get_args(KernelKind))
    assert not sorted(word for word in words if f"`{word}`" not in PAGE)
