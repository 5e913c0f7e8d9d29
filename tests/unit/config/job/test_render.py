from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.config.job.load import resolved
from rrl.config.job.render import as_toml
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.config.job.task_rules import check_held_out, check_task
from rrl.core.run_spec import TrainerSettings
from rrl.core.units import duration_text, seconds, size, size_text
from rrl.tests.support.job_toml import JOB


def job(**changes: Any) -> Job:
    return Job.model_validate(tomllib.loads(JOB) | changes)


def test_the_written_spec_is_a_valid_job_toml_of_the_same_job() -> None:
    phases = {"train": {"longest": "8h"}, "my eval": {"longest": "90s", "progresses": False}}
    extras = {"experts": {"per_token": "384B"}, "image": {"per_trajectory": "1MiB"}}
    roles, sampling = {"rollout": {"command": ["mine"]}}, {"extras": extras}
    before = job(slurm={"account": "a", "exclusive": True, "nice": 3}, phases=phases, roles=roles, sampling=sampling)
    after = Job.model_validate(tomllib.loads(as_toml(before)))
    assert resolved(after) == resolved(before)
    assert after.roles.rollout.min_replicas == 1


@pytest.mark.parametrize("form", ["replica", "hetjob"])
def test_written_form_without_a_pool_can_be_read_again(form: str) -> None:
    before = job(cluster={"kind": "slurm", "form": form, "one_node_components": True})
    text = as_toml(before)
    after = Job.model_validate(tomllib.loads(text))
    assert (resolve(after, "python"), as_toml(after)) == (resolve(before, "python"), text)


def test_job_without_a_staleness_limit_is_written_and_read_again() -> None:
    before = job(sampling={"staleness": "unlimited"})
    after = Job.model_validate(tomllib.loads(as_toml(before)))
    assert (after.sampling, resolve(after, "python").sampling.staleness) == (before.sampling, None)
    assert resolve(job(), "python").sampling.staleness == 4


@pytest.mark.parametrize("given", [{}, {"ahead": 0}])
def test_on_policy_job_is_written_and_read_again(given: dict[str, int]) -> None:
    before = job(sampling={"staleness": 0, **given})
    after = Job.model_validate(tomllib.loads(as_toml(before)))
    assert after.sampling == before.sampling
    assert resolve(after, "python").sampling.ahead == 0, "rollouts would sample tokens that are too old for every step"
    assert resolve(job(), "python").sampling.ahead == 1


def test_prompt_files_and_rewards_are_written_and_read_again() -> None:
    files = [{"path": "/a.jsonl", "name": "a", "weight": 2.5}, {"path": "/b.parquet", "name": "b"}]
    rewards = {"right": {"function": "my:right"}, "short": {"function": "my:short", "weight": -0.5}}
    held_out = {"files": [{"path": "/c.jsonl", "name": "c"}], "rewards": rewards}
    before = job(task={"files": files, "rewards": rewards}, eval={"every": 5, "task": held_out})
    after = Job.model_validate(tomllib.loads(as_toml(before)))
    for one in (before, after):
        assert one.task is not None
        assert one.eval is not None
        assert one.eval.task is not None
        check_task(one.task, ("task",))
        check_held_out(one.eval.task, one.task)
    assert (resolve(after, "python"), as_toml(after)) == (resolve(before, "python"), as_toml(before))


def test_every_default_is_written() -> None:
    text = as_toml(job())
    wanted = 'walltime = "1d"', 'silence = "10s"', 'chunk = "8MiB"', "learning_rate = 0.001", "breaker = 0.2"
    for line in (*wanted, "staleness = 4", 'late = "wait"', "stream = false", "window = 1"):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("model", "trainer", "expected"),
    [
        ({"tokenizer": {"pieces": "01"}}, {}, (1e-3, 0.02, 3e-3)),
        ({"path": "/m"}, {}, (1e-6, 0.0, 1e-5)),
        ({"path": "/m"}, {"learning_rate": 3e-5, "entropy": 0.01}, (3e-5, 0.01, 1e-5)),
    ],
)
def test_defaults_of_the_learning_depend_on_the_model_wherever_they_are_read(
    model: dict[str, Any], trainer: dict[str, float], expected: tuple[float, ...]
) -> None:
    before = job(model=model, roles={"trainer": trainer})
    written = Job.model_validate(tomllib.loads(as_toml(before))).roles.trainer
    read = resolve(before, "python").trainer
    for one in (written, read):
        assert (one.learning_rate, one.entropy, one.warm_start_learning_rate) == expected
    shown = resolved(before)["roles"]["trainer"]
    assert (shown["learning_rate"], shown["entropy"], shown["warm_start_learning_rate"]) == expected
    assert resolve(job(), "python").trainer == TrainerSettings(), "the defaults of a trained model have replaced others"


_TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=8)
_ARGS = st.dictionaries(
    _TEXT,
    st.recursive(
        _TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(_ARGS, st.lists(_TEXT, min_size=1, max_size=3))
def test_round_trip_keeps_any_values(args: dict[str, Any], command: list[str]) -> None:
    before = job(task={"dataset": "x", "args": args}, roles={"reward": {"command": command}})
    after = Job.model_validate(tomllib.loads(as_toml(before)))
    assert resolved(after) == resolved(before)


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.5s"), (90, "90s"), (120, "2min"), (86400, "1d"), (0, "0s")])
def test_durations_are_written_in_the_largest_whole_unit(value: float, text: str) -> None:
    assert duration_text(value) == text
    assert seconds(text) == value


@given(st.integers(0, 2**50))
def test_sizes_read_back_as_written(nbytes: int) -> None:
    assert size(size_text(nbytes)) == nbytes
