"""Actions are carried out once, and their results are recorded as far as they are known."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rrl.cluster.base import AllocationRequest, ClusterSnapshot, Refused, RejectReason, Step, Unanswered
from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.execute.executor import RETRY_INTERVAL_S, STEP_MARGIN_S, Executor, StandbyOutdated, StepControl
from rrl.manager.model import events as ev
from rrl.manager.model.actions import ExternalAction, InjectFault, Launch, Release, Request, StopStep, Why
from rrl.manager.storage.lease import LeaseLost
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import NODE, ROLLOUTS

WHY = Why(("because",))
R1 = Incarnation(ROLLOUTS[0], 1)
REQUEST = Request(AllocationRequest("pool", 1, NODE, 60.0), WHY)
RELEASE = Release("pool", WHY)
LAUNCH = Launch(R1, "step", "pool", NodeName("n1"), WHY)
STOP = StopStep("step", R1, 5.0, WHY)
INJECT = InjectFault(Fault("f0", FaultKind.KILL, R1.replica, FaultTrigger(step=0)), "step", NodeName("n1"), WHY)
ALL = (REQUEST, RELEASE, LAUNCH, STOP, INJECT)


@pytest.fixture
def bench() -> Bench:
    return Bench()


class Scripted:
    """A cluster that answers calls in turn with the given answers, and then accepts every call.

    An answer that is an exception is raised, and the answer None accepts the call.
    """

    def __init__(self, *answers: Exception | None) -> None:
        self.requests: list[tuple[str, str]] = []
        self.blocked: asyncio.Event | None = None
        self._answers = list(answers)

    async def _answer(self, verb: str, tag: str) -> None:
        self.requests.append((verb, tag))
        if self.blocked is not None:
            await self.blocked.wait()
        if self._answers and (answer := self._answers.pop(0)) is not None:
            raise answer

    async def request(self, request: AllocationRequest) -> None:
        await self._answer("request", request.tag)

    async def release(self, tag: str) -> None:
        await self._answer("release", tag)

    async def launch(self, step: Step) -> None:
        await self._answer("launch", step.tag)

    async def release_launcher(self, tag: str) -> None:
        await self._answer("joined", tag)

    async def stop(self, tag: str, grace: float) -> None:
        await self._answer("stop", tag)

    async def drain(self, node: NodeName, reason: str) -> None:
        await self._answer("drain", node)

    async def undrain(self, node: NodeName, reason: str) -> None:
        await self._answer("undrain", node)

    async def shrink(self, tag: str, nodes: tuple[NodeName, ...]) -> None:
        await self._answer("shrink", tag)

    async def inject_fault(self, fault: Fault) -> str:
        raise Refused("not here")

    async def observe(self) -> ClusterSnapshot:
        return ClusterSnapshot(None, None, None)

    async def close(self) -> None:
        pass


class ScriptedSteps(StepControl):
    """Prepares launches and requests stops as the fields of the bench determine."""

    def __init__(self, context: RunContext, bench: Bench) -> None:
        super().__init__(context, bench.cluster, "job.toml")
        self._bench = bench

    def prepare_launch(self, action: Launch) -> Step:
        if self._bench.cannot_prepare is not None:
            raise self._bench.cannot_prepare
        return Step(action.step, action.allocation, action.node, NODE, Path("launch"), Path("log"))

    async def check_standby(self, action: Launch) -> None:
        if self._bench.outdated:
            raise StandbyOutdated("other PATH")

    async def request_stop(self, action: StopStep, timeout_s: float) -> bool:
        self._bench.sent.append(timeout_s)
        return self._bench.stops_itself


def _unused(*_: Any) -> Any:
    raise AssertionError("the executor has read the state or sent a message itself")


class Bench:
    """An executor whose cluster and whose other components are scripted."""

    def __init__(self, *answers: Exception | None) -> None:
        self.cluster = Scripted(*answers)
        self.recorded: list[ev.Event] = []
        self.stops_itself = False
        self.injected: list[InjectFault] = []
        self.promoted: list[Launch] = []
        self.outdated = False
        """Whether standby processes have an outdated environment."""
        self.lost = False
        self.failing_checks = 0
        """Number of further reads of the run directory that fail."""
        self.cannot_prepare: OSError | None = None
        self.sent: list[float] = []
        context = RunContext(RunDir(Path("run")), HealthMonitor(), _unused, self.recorded.append, _unused, _unused)
        self.executor = Executor(
            context, self.cluster, ScriptedSteps(context, self), self._inject, self._check, self._promote
        )

    async def _promote(self, action: Launch) -> None:
        self.promoted.append(action)

    async def _inject(self, action: InjectFault) -> None:
        self.injected.append(action)

    async def _check(self) -> None:
        if self.failing_checks:
            self.failing_checks -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        if self.lost:
            raise LeaseLost("epoch 2 has begun")

    def carry_out(
        self, *actions: ExternalAction, during: Callable[[], Awaitable[None]] | None = None
    ) -> list[ev.Event]:
        """Start the actions, let an hour pass, and return the recorded events."""

        async def carry_out_all() -> None:
            for action in actions:
                self.executor.start(action)
            if during is not None:
                await during()
            await asyncio.sleep(3600.0)
            assert self.executor.busy == frozenset()
            await self.executor.close()

        virtual.run(carry_out_all())
        return self.recorded


def test_action_that_the_cluster_confirmed_is_settled() -> None:
    assert Bench().carry_out(REQUEST) == [ev.IntentSettled("pool", True)]
    assert Bench().carry_out(RELEASE) == [ev.IntentSettled("pool!release", True)]
    assert Bench().carry_out(STOP) == [ev.IntentSettled("step!stop", True)]


def test_outdated_standby_process_is_not_promoted() -> None:
    promotion = Launch(R1, "step", "pool", NodeName("n1"), WHY, Incarnation(ReplicaId("standby/n1"), 1))
    bench = Bench()
    assert bench.carry_out(promotion) == []
    assert bench.promoted == [promotion]
    bench = Bench()
    bench.outdated = True
    assert bench.carry_out(promotion) == [
        ev.IntentSettled("step", False, "other PATH", reason=RejectReason.STANDBY_OUTDATED)
    ]
    assert (bench.promoted, bench.cluster.requests) == ([], [])


def test_accepted_launch_stays_open_until_its_step_connects(bench: Bench) -> None:
    assert bench.carry_out(LAUNCH) == []
    assert bench.cluster.requests == [("launch", "step")]


@pytest.mark.parametrize("action", [REQUEST, RELEASE, LAUNCH, STOP], ids=lambda action: type(action).__name__)
def test_refused_action_is_settled_with_the_clusters_text_and_reason(action: ExternalAction) -> None:
    bench = Bench(Refused("Invalid partition"))
    assert bench.carry_out(action) == [
        ev.IntentSettled(action.tag, False, "Invalid partition", reason=RejectReason.REFUSED)
    ]
    assert len(bench.cluster.requests) == 1


@pytest.mark.parametrize("action", [REQUEST, LAUNCH], ids=lambda action: type(action).__name__)
@pytest.mark.parametrize("answer", [Unanswered("timed out"), ValueError("unexpected")])
def test_unanswered_request_or_launch_is_not_repeated_and_stays_open(action: ExternalAction, answer: Exception) -> None:
    bench = Bench(answer)
    assert bench.carry_out(action) == []
    assert len(bench.cluster.requests) == 1


@pytest.mark.parametrize("action", [STOP, RELEASE], ids=lambda action: type(action).__name__)
def test_unanswered_repeatable_action_is_retried(action: ExternalAction) -> None:
    bench = Bench(Unanswered("timed out"), Unanswered("timed out"), None)
    assert bench.carry_out(action) == [ev.IntentSettled(action.tag, True)]
    assert len(bench.cluster.requests) == 3


@pytest.mark.parametrize("action", [RELEASE, STOP], ids=lambda action: type(action).__name__)
def test_unexpected_error_of_a_repeatable_action_is_retried(
    action: ExternalAction, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(ValueError("unexpected"), PermissionError("unexpected too"))
    assert bench.carry_out(action) == [ev.IntentSettled(action.tag, True)]
    assert len(bench.cluster.requests) == 3
    assert "ValueError: unexpected" in caplog.text


def test_retries_are_separated_by_a_pause() -> None:
    bench = Bench(Unanswered("timed out"), Unanswered("timed out"), None)

    async def before_the_third() -> None:
        await asyncio.sleep(1.9 * RETRY_INTERVAL_S)
        assert len(bench.cluster.requests) == 2

    bench.carry_out(RELEASE, during=before_the_third)


def test_step_that_ends_on_request_is_not_stopped_by_the_cluster(bench: Bench) -> None:
    bench.stops_itself = True
    assert bench.carry_out(STOP) == [ev.IntentSettled("step!stop", True)]
    assert (bench.cluster.requests, bench.sent) == ([], [STOP.grace + STEP_MARGIN_S])


def test_step_that_ignores_the_request_is_stopped_by_the_cluster(bench: Bench) -> None:
    bench.carry_out(STOP)
    assert bench.cluster.requests == [("stop", "step")]


def test_fault_action_is_settled_by_the_fault_injector(bench: Bench) -> None:
    assert bench.carry_out(INJECT) == []
    assert bench.injected == [INJECT]


def test_unwritable_launch_file_refuses_the_launch(bench: Bench) -> None:
    bench.cannot_prepare = OSError(28, "No space left on device")
    (done,) = bench.carry_out(LAUNCH)
    assert isinstance(done, ev.IntentSettled)
    assert (done.tag, done.ok, bench.cluster.requests) == ("step", False, [])
    assert "No space left on device" in done.detail


@pytest.mark.parametrize("action", ALL, ids=lambda action: type(action).__name__)
def test_manager_without_the_lease_carries_out_and_records_nothing(action: ExternalAction, bench: Bench) -> None:
    bench.lost = True
    assert bench.carry_out(action) == []
    assert (bench.cluster.requests, bench.sent) == ([], [])


def test_lease_lost_between_retries_ends_them() -> None:
    bench = Bench(Unanswered("timed out"))

    async def lose() -> None:
        await asyncio.sleep(RETRY_INTERVAL_S / 2)
        bench.lost = True

    assert bench.carry_out(RELEASE, during=lose) == []
    assert len(bench.cluster.requests) == 1


@pytest.mark.parametrize("action", [REQUEST, RELEASE, LAUNCH, STOP], ids=lambda action: type(action).__name__)
def test_action_waits_for_the_run_directory_and_is_done_once(action: ExternalAction, bench: Bench) -> None:
    bench.failing_checks = 3

    async def check_waiting() -> None:
        await asyncio.sleep(2.5 * RETRY_INTERVAL_S)
        assert bench.cluster.requests == []
        assert bench.executor.busy == {action.tag}, "the action counts as settled"

    bench.carry_out(action, during=check_waiting)
    assert len(bench.cluster.requests) == 1


def test_running_action_is_not_started_twice(bench: Bench) -> None:

    async def carry_out_all() -> None:
        bench.cluster.blocked = asyncio.Event()
        bench.executor.start(REQUEST)
        await asyncio.sleep(1.0)
        assert bench.executor.busy == {"pool"}
        bench.executor.start(REQUEST)
        await asyncio.sleep(1.0)
        bench.cluster.blocked.set()
        await asyncio.sleep(1.0)
        assert bench.executor.busy == frozenset()

    virtual.run(carry_out_all())
    assert bench.cluster.requests == [("request", "pool")]
    assert bench.recorded == [ev.IntentSettled("pool", True)]


def test_different_actions_run_concurrently(bench: Bench) -> None:

    async def carry_out_all() -> None:
        bench.cluster.blocked = asyncio.Event()
        for action in (REQUEST, LAUNCH, STOP):
            bench.executor.start(action)
        await asyncio.sleep(1.0)
        assert len(bench.cluster.requests) == 3
        await bench.executor.close()

    virtual.run(carry_out_all())


def test_close_cancels_running_actions_without_an_event(bench: Bench) -> None:

    async def carry_out_all() -> None:
        bench.cluster.blocked = asyncio.Event()
        bench.executor.start(REQUEST)
        await asyncio.sleep(1.0)
        await bench.executor.close()
        assert bench.executor.busy == frozenset()

    virtual.run(carry_out_all())
    assert bench.recorded == []
