from __future__ import annotations

from rrl.core.types import ReplicaId
from rrl.roles.worker.status.episode_status import EpisodeStatus
from rrl.tests.support.roles.worker_scene import JOB


class Reported:
    """The phases and counts that a process has reported."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.done = 0
        self.status = EpisodeStatus(JOB, self._set_phase, self._count)

    def _set_phase(self, name: str, waits_for: ReplicaId | None, cause: str | None) -> None:
        self.phases.append(name)

    def _count(self, units: int) -> None:
        self.done += units


def test_phase_of_an_agents_process_follows_its_attempts_and_calls() -> None:
    reported = Reported()
    with reported.status as status:
        status.attempts_changed(1)
        status.attempts_changed(2)
        status.endpoint_changed(waiting=1, answered=0)
        status.endpoint_changed(waiting=2, answered=0)
        status.endpoint_changed(waiting=1, answered=1)
        status.endpoint_changed(waiting=0, answered=2)
        status.attempts_changed(0)
    assert reported.phases == ["wait_work", "act", "wait_turn", "act", "wait_work", "between"]
    assert reported.done == 2


def test_process_with_blocking_code_is_in_phase_act_once_its_calls_are_answered() -> None:
    reported = Reported()
    reported.status.attempts_changed(2)
    reported.status.endpoint_changed(waiting=2, answered=0)
    # the thread of the attempts is blocked, and reports nothing
    reported.status.endpoint_changed(waiting=0, answered=2)
    assert reported.phases[-1] == "act"
