from __future__ import annotations

import random
import tomllib
from pathlib import Path

import msgspec
import pytest

from rrl.config.job.faults import FaultsTable
from rrl.config.job.load import SpecError, load_job
from rrl.config.job.resolve import MAX_RANDOM_FAULTS, plan_faults, resolve
from rrl.config.job.schema import Job
from rrl.core.faults import (
    FAULT_TRAITS,
    Fault,
    FaultKind,
    FaultProblem,
    FaultTrigger,
    InvalidFault,
    TargetKind,
    parse_trigger,
    resolve_target,
    validate_fault,
)
from rrl.tests.support.job_toml import JOB

REPLICAS = {"trainer": 1, "rollout": 4}
RANDOM = {"kinds": ["kill", "freeze", "slow"], "every": "60s", "seconds": "5s", "amount": 0.5}


def drawn(horizon: float = 3600.0, **table: object) -> tuple[Fault, ...]:
    return plan_faults(FaultsTable.model_validate(table), REPLICAS, horizon)


def test_the_same_seed_draws_the_same_faults_and_another_one_others() -> None:
    assert drawn(seed=1, random=[RANDOM]) == drawn(seed=1, random=[RANDOM])
    assert drawn(seed=1, random=[RANDOM]) != drawn(seed=2, random=[RANDOM])


def test_random_faults_come_at_their_rate_over_the_whole_run_and_each_hits_one_replica() -> None:
    faults = drawn(horizon=60 * 500, seed=3, random=[RANDOM])
    assert 400 < len(faults) < 600
    times = [fault.at.time or 0.0 for fault in faults]
    assert times == sorted(times)
    assert times[-1] <= 60 * 500
    assert {fault.target for fault in faults} == {"trainer/0", *(f"rollout/{i}" for i in range(4))}
    assert len({fault.id for fault in faults}) == len(faults)


def test_parameters_that_a_kind_does_not_take_are_omitted_from_a_drawn_fault() -> None:
    how = {fault.kind: (fault.seconds, fault.amount) for fault in drawn(seed=3, random=[RANDOM])}
    assert how == {FaultKind.KILL: (0.0, 0.0), FaultKind.FREEZE: (5.0, 0.0), FaultKind.SLOW: (5.0, 0.5)}


def test_number_of_random_faults_is_bounded() -> None:
    faults = drawn(horizon=86400.0, random=[{**RANDOM, "every": "1s"}])
    assert len(faults) == MAX_RANDOM_FAULTS
    assert len(msgspec.msgpack.encode(faults)) < 100 * MAX_RANDOM_FAULTS


def test_a_planned_fault_of_a_role_hits_one_of_its_replicas() -> None:
    (fault,) = drawn(planned=[{"kind": "kill", "target": "rollout", "at": "step=5"}])
    assert fault.target in {f"rollout/{i}" for i in range(4)}
    assert fault.at == FaultTrigger(step=5)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("step=5", FaultTrigger(step=5)),
        ("time=90s", FaultTrigger(time=90.0)),
        ("phase=train", FaultTrigger(phase="train")),
    ],
)
def test_trigger_is_read_and_shown_as_written(text: str, at: FaultTrigger) -> None:
    assert parse_trigger(text) == at
    assert str(at) == text


@pytest.mark.parametrize("text", ["", "step", "step=", "step=-1", "step=1.5", "time=soon", "when=1", "step=9999999999"])
def test_invalid_trigger_is_refused_with_a_valid_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"step=5|whole number|write for example"):
        parse_trigger(text)


def test_every_kind_has_traits_that_agree_with_each_other() -> None:
    assert FAULT_TRAITS.keys() == set(FaultKind)
    for traits in FAULT_TRAITS.values():
        assert traits.takes_seconds or not traits.needs_seconds
        assert traits.target_kind is TargetKind.REPLICA or not traits.by_signals


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_fits_some_target(kind: FaultKind) -> None:
    traits = FAULT_TRAITS[kind]
    seconds, amount = (
        (5.0 if traits.needs_seconds else 0.0),
        (0.5 if kind is FaultKind.SLOW else 3.0 if traits.amount else 0.0),
    )
    target = "" if traits.target_kind is TargetKind.RUN else "rollout/0"
    assert validate_fault(kind, target, seconds, amount, REPLICAS) is None
    assert validate_fault(kind, "rollout/4", seconds, amount, REPLICAS)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("trainer/0", ""),
        ("trainer/0.1", ""),
        ("trainer/0.3", ""),
        ("standby/n1:1", ""),
        ("trainer/0.0", 'no rank "trainer/0.0"; the first is "trainer/0", the last "trainer/0.3"'),
        ("trainer/0.4", 'no rank "trainer/0.4"; the first is "trainer/0", the last "trainer/0.3"'),
        ("trainer/0.x", 'no rank "trainer/0.x"; the first is "trainer/0", the last "trainer/0.3"'),
        ("trainer/1.1", 'no replica "trainer/1.1"; role trainer has 1, the last is "trainer/0"'),
        ("rollout/1.1", 'no rank "rollout/1.1"; rollout/1 is one process'),
    ],
)
def test_only_existing_ranks_and_standby_processes_are_valid_targets(target: str, why: str) -> None:
    wrong = validate_fault(FaultKind.KILL, target, 0.0, 0.0, REPLICAS, ranks={"trainer": 4})
    assert wrong == (InvalidFault(FaultProblem.NO_SUCH_TARGET, why) if why else None)


def test_standby_process_accepts_only_signal_faults() -> None:
    wrong = validate_fault(FaultKind.EXIT, "standby/n1", 0.0, 3.0, REPLICAS)
    assert wrong is not None
    assert wrong.text == "a standby process can only be the target of kill, freeze, slow, not of exit"


def test_fault_of_the_whole_run_draws_no_target() -> None:
    assert resolve_target("", FaultKind.OUTAGE, REPLICAS, random.Random(0)) == ""


def test_no_replica_of_a_pool_that_may_be_empty_is_drawn() -> None:
    empty = {"burst": 0, "trainer": 1}
    assert resolve_target("", FaultKind.KILL, empty, random.Random(0)) == "trainer/0"
    assert resolve_target("burst", FaultKind.KILL, empty, random.Random(0)) == "burst"


def test_program_without_worker_api_cannot_inject_faults_into_itself(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    own = '[commands.judge]\ncommand = ["judge"]\nwatch = "activity"\n'
    planned = JOB.replace('target = "rollout/0"', 'target = "judge/0"') + own
    path.write_text(planned)
    load_job(path)
    path.write_text(planned.replace('kind = "kill"', 'kind = "exception"'))
    with pytest.raises(SpecError, match="exception needs the worker API, but judge/0 does not use it"):
        load_job(path)


def test_invalid_fault_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for old, new, why in (
        ('kind = "kill"', 'kind = "cut"', "cut needs seconds: its duration"),
        ('at = "step=5"', 'at = "step=5"\nseconds = "3s"', "kill is permanent: it takes no seconds"),
        ('kind = "kill"', 'kind = "exit"\namount = 256', "exit needs amount, the exit code, from 0 to 255"),
    ):
        path.write_text(JOB.replace(old, new))
        with pytest.raises(SpecError, match=why):
            load_job(path)
    view = resolve(Job.model_validate(tomllib.loads(JOB)), "python")
    assert [fault.id for fault in view.faults] == ["f0"]
    assert not view.faults_allowed
