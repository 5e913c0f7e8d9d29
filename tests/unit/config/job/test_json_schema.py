"""The JSON Schema of job.toml accepts every shipped job.

It rejects mistakes that a schema can express: unknown keys, wrong types, units and choices.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rrl.config.job.json_schema import json_schema
from rrl.config.job.load import load_job
from rrl.config.job.render import as_toml
from rrl.config.job.schema import Job
from rrl.core.units import DURATION_PATTERN, SIZE_PATTERN, seconds, size
from rrl.tests.support.cli.agent_runs import ENDPOINT_JOB
from rrl.tests.support.job_toml import JOB
from rrl.tests.support.runs import light_job

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.toml"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_TOML_BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Any:
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def errors(validator: Any, data: dict[str, Any]) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(data)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_job_is_valid_as_written_and_with_every_default(path: Path, validator: Any) -> None:
    assert errors(validator, tomllib.loads(path.read_text())) == []
    assert errors(validator, tomllib.loads(as_toml(load_job(path)))) == []


@pytest.mark.parametrize("text", [JOB, ENDPOINT_JOB, light_job("slurm", 3)], ids=["small", "endpoint", "light"])
def test_job_of_the_tests_is_valid(text: str, validator: Any) -> None:
    assert errors(validator, tomllib.loads(text)) == []
    assert errors(validator, tomllib.loads(as_toml(Job.model_validate(tomllib.loads(text))))) == []


def test_every_toml_block_of_the_pages_is_valid(validator: Any) -> None:
    blocks = [(page.name, tomllib.loads(block)) for page in PAGES for block in _TOML_BLOCK.findall(page.read_text())]
    # a block with `expect` has the site's health rules
    jobs = [(name, block) for name, block in blocks if "expect" not in block]
    assert len(jobs) > 10
    for name, block in jobs:
        assert errors(validator, {"run": {"name": "page"}} | block) == [], name


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ("[roles.rollout]\nreplica = 2\n", "roles.rollout: Additional properties"),
        ("[roles.rollout]\nreplicas = -1\n", "roles.rollout.replicas: -1 is less than"),
        ('[roles.rollout]\nmem = "8"\n', "roles.rollout.mem: '8' does not match"),
        ("[roles.rollout]\nmem = 8\n", "roles.rollout.mem: 8 is not of type 'string'"),
        ('[cluster]\nwalltime = "8 hours"\n', "cluster.walltime: '8 hours' does not match"),
        ("[cluster]\njob_walltime = 8\n", "cluster.job_walltime: 8 is not of type 'string'"),
        ('[cluster]\nkind = "slrum"\n', "cluster.kind: 'slrum' is not one of"),
        ('[[faults.planned]]\nkind = "kil"\nat = "step=1"\n', "faults.planned.0.kind: 'kil' is not one of"),
        ("[commands.judge]\nreplicas = 2\n", "commands.judge: 'command' is a required property"),
        ('[transport]\nweights = "udp"\n', "transport.weights: 'udp' is not one of"),
    ],
)
def test_mistake_is_found_at_its_key(validator: Any, extra: str, place: str) -> None:
    (error,) = errors(validator, {"run": {"name": "small"}} | tomllib.loads(extra))
    assert error.startswith(place)


def test_every_key_is_described_and_its_default_is_one_that_a_job_may_have(schema: dict[str, Any]) -> None:
    tables = [schema, *(table for table in schema["definitions"].values() if "properties" in table)]
    described = 0
    for table in tables:
        for name, key in table["properties"].items():
            is_table = "allOf" in key or '"$ref"' in json.dumps(key)  # the table describes itself
            assert key.get("description") or is_table, name
            described += "description" in key
            if "default" in key:
                jsonschema.Draft7Validator(key | {"definitions": schema["definitions"]}).validate(key["default"])
    assert described > 150
    assert schema["definitions"]["LimitsTable"]["properties"]["heartbeat"]["default"] == "1s"
    assert schema["definitions"]["RolloutRole"]["properties"]["mem"]["default"] == "1GiB"


DURATIONS = (
    "500ms",
    "90s",
    "1.5min",
    " 2h ",
    "1d",
    "30:00",
    "1-12:00",
    "1-12:00:30",
    "5",
    "s",
    "-5s",
    "5 weeks",
    "1:2",
    "1:00:0",
)
SIZES = ("16GiB", "1.5MiB", "1KB", " 7B ", "7 B", "5", "GiB", "5G", "-1GiB", "5 gib", "5TB", "5iB")


@pytest.mark.parametrize(
    ("pattern", "read", "text"),
    [*((DURATION_PATTERN, seconds, one) for one in DURATIONS), *((SIZE_PATTERN, size, one) for one in SIZES)],
)
def test_pattern_of_durations_and_sizes_agrees_with_the_reader(
    pattern: str, read: Callable[[str], object], text: str
) -> None:
    try:
        read(text)
        valid = True
    except ValueError:
        valid = False
    assert bool(re.search(pattern, text)) == valid
