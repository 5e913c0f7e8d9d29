from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from rrl.config.job.resolve import resolve, with_dependent_defaults
from rrl.config.job.roles import RewardRole, RolloutRole, TrainerRole
from rrl.config.job.schema import Job, ModelTable, SamplingTable, TaskTable, TransportTable
from rrl.core import run_spec, task_spec
from rrl.core.phases import PHASES
from rrl.core.run_spec import RunSpec, TokenizerSpec
from rrl.tests.support.job_toml import JOB

TABLES: tuple[tuple[type[BaseModel], type[msgspec.Struct]], ...] = (
    (TrainerRole, run_spec.TrainerSettings),
    (RolloutRole, run_spec.RolloutSettings),
    (RewardRole, run_spec.RewardSettings),
    (SamplingTable, run_spec.SamplingSpec),
    (TransportTable, run_spec.TransportSpec),
    (ModelTable, run_spec.ModelSpec),
    (TaskTable, task_spec.TaskSpec),
)


def spec(text: str = "") -> RunSpec:
    return resolve(Job.model_validate(tomllib.loads(f"{JOB}\n{text}")), "python")


@pytest.mark.parametrize(("table", "struct"), TABLES)
def test_typed_table_has_fields_and_defaults_of_job_toml(table: type[BaseModel], struct: type[msgspec.Struct]) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    dependent = with_dependent_defaults(Job.model_validate(tomllib.loads(JOB))).roles.trainer
    expected = {
        name: getattr(dependent, name) if table is TrainerRole else table.model_fields[name].default
        for name in defaults
    }
    containers = [name for name, value in expected.items() if value == {}]  # the struct has a default factory
    assert {name: value for name, value in defaults.items() if name not in containers} == {
        name: value for name, value in expected.items() if name not in containers
    }


def test_typed_table_has_every_key_of_a_table_without_role_keys() -> None:
    for table, struct in TABLES:
        if not issubclass(table, TrainerRole | RolloutRole | RewardRole):
            assert set(table.model_fields) == set(struct.__struct_fields__), table


def test_written_values_reach_the_roles_through_the_run_spec_file() -> None:
    text = """
[sampling]
staleness = "unlimited"
temperature = 0.7

[transport]
chunk = "1MiB"
network = "ib0"

[roles.trainer]
kl = 0.1
command = ["python", "mine.py"]

[commands.judge]
command = ["python", "judge.py"]
options = { depth = 3, names = ["a"] }
"""
    resolved = spec(text)
    read = msgspec.json.decode(msgspec.json.encode(resolved), type=RunSpec)
    assert read == resolved
    assert (read.sampling.staleness, read.sampling.temperature) == (None, 0.7)
    assert (read.transport.chunk, read.transport.network, read.trainer.kl) == (2**20, "ib0", 0.1)
    assert (read.role("trainer").built_in, read.role("rollout").built_in) == (False, True)
    assert read.role("judge").options == {"depth": 3, "names": ["a"]}
    assert read.role("trainer").options == {}
    assert read.task.args == {"min_terms": 2, "seeds": [1, 2]}


def test_built_model_has_its_maximum_length_and_pieces() -> None:
    assert spec().model.max_length == 64
    assert spec().model.tokenizer == TokenizerSpec(tuple("0123456789+= "))


def test_model_folder_leaves_its_maximum_length_to_the_nodes() -> None:
    table: dict[str, Any] = tomllib.loads(JOB) | {"model": {"path": "/models/m"}}
    model = resolve(Job.model_validate(table), "python").model
    assert (model.path, model.max_length, model.tokenizer) == ("/models/m", None, None)


@pytest.mark.parametrize(
    ("model", "tokens", "recomputes"), [({"path": "/models/m"}, 8192, True), ({"hidden_size": 64}, None, False)]
)
def test_only_passes_of_a_model_folder_are_bounded_by_default(
    model: dict[str, Any], tokens: int | None, recomputes: bool
) -> None:
    table = tomllib.loads(JOB)
    table["model"] = model if "path" in model else table["model"] | model
    trainer = resolve(Job.model_validate(table), "python").trainer
    assert (trainer.micro_batch_tokens, trainer.activation_checkpointing) == (tokens, recomputes)


def test_job_without_a_task_has_the_defaults_of_training() -> None:
    table = {"run": {"name": "own"}, "commands": {"judge": {"command": ["true"]}}}
    resolved = resolve(Job.model_validate(table), "python")
    assert (resolved.steps, resolved.model, resolved.task) == (0, run_spec.ModelSpec(), task_spec.TaskSpec())


def test_worker_api_is_imported_without_pydantic() -> None:
    """Every role imports the worker API, and pydantic would cost each process time and memory."""
    code = "import sys; import rrl.roles.worker.api; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "shortest"),
    [
        ({}, 300.0),
        ({"task": {"function": "module:task"}}, 1800.0),
        ({"roles": {"reward": {"command": ["./judge"]}}}, 1800.0),
        ({"task": {"function": "module:task"}, "phases": {"score": {"shortest": "5min"}}}, 300.0),
        ({"task": {"function": "module:task"}, "phases": {"score": {"longest": "20min"}}}, 1200.0),
        ({"task": {"function": "module:task"}, "phases": {"score": {"longest": "2h"}}}, 1800.0),
    ],
)
def test_phase_score_with_user_code_lasts_long_enough_for_a_rate_limit(
    changes: dict[str, Any], shortest: float
) -> None:
    job = Job.model_validate(tomllib.loads(JOB) | changes)
    assert resolve(job, "python").limits.phase("score").shortest == shortest


def test_agents_are_a_role_whose_phase_act_may_last_as_long_as_an_attempt() -> None:
    plain = spec()
    assert plain.agents is None
    assert "agents" not in [role.name for role in plain.roles]
    assert plain.limits.phase("act") == PHASES["act"]

    pieces = 'pieces = "0123456789+= "'
    job = JOB.replace(pieces, f'{pieces}\nchat = {{ user = "{{content}}=" }}')
    job += '[roles.agents]\nfunction = "m:f"\ntimeout = "2h"\nreplicas = 3\n'
    made = resolve(Job.model_validate(tomllib.loads(job)), "python")
    assert made.agents == run_spec.AgentsSettings("m:f", timeout=7200.0)
    assert made.model.tokenizer is not None
    assert made.model.tokenizer.chat == {"user": "{content}="}
    role = made.role("agents")
    assert (role.replicas, role.min_replicas, role.argv) == (3, 1, ("python", "-P", "-m", "rrl.roles.agents.main"))
    act = made.limits.phase("act")
    assert (act.shortest, act.longest) == (7500.0, 7500.0)

    job = job.replace('function = "m:f"', 'command = ["./play", "-v"]\nreward_timeout = "1h"')
    made = resolve(Job.model_validate(tomllib.loads(job)), "python")
    assert made.agents == run_spec.AgentsSettings(command=("./play", "-v"), timeout=7200.0, reward_timeout=3600.0)
    assert (made.role("agents").argv, made.role("agents").built_in) == (role.argv, True)

    made = resolve(Job.model_validate(tomllib.loads(job + 'per = "replica"\n')), "python")
    assert (made.role("agents").argv, made.role("agents").built_in) == (("./play", "-v"), False)


def test_endpoint_is_a_role_with_the_written_settings_and_the_defaults() -> None:
    assert spec().endpoint is None
    pieces = 'pieces = "0123456789+= "'
    job = JOB.replace(pieces, f'{pieces}\nchat = {{ user = "{{content}}=" }}')
    table = '[roles.endpoint]\nreplicas = 2\nforeign = "context"\ntimeout = "2h"\nreward_timeout = "1h"\n'
    made = resolve(Job.model_validate(tomllib.loads(job + table)), "python")
    assert made.endpoint == run_spec.EndpointSettings(foreign="context", timeout=7200.0, reward_timeout=3600.0)
    assert made.agents is None
    role = made.role("endpoint")
    assert (role.replicas, role.min_replicas, role.argv) == (2, 1, ("python", "-P", "-m", "rrl.roles.endpoint.main"))


def test_an_endpoint_without_replicas_is_settings_of_the_agents_and_no_role() -> None:
    pieces = 'pieces = "0123456789+= "'
    job = JOB.replace(pieces, f'{pieces}\nchat = {{ user = "{{content}}=" }}')
    table = '[roles.agents]\nfunction = "m:f"\n[roles.endpoint]\nreplicas = 0\nforeign = "context"\n'
    made = resolve(Job.model_validate(tomllib.loads(job + table)), "python")
    assert made.endpoint is not None
    assert made.endpoint.foreign == "context"
    assert [role.kind for role in made.roles if role.kind in ("agents", "endpoint")] == ["agents"]
