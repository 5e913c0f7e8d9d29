"""The use of GPUs is recorded in the journal at long intervals, and the state gets it from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.launch import tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import GpuUse, Incarnation, NodeName, Outcome, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.intake.interval_recorders import GPU_USE_RECORD_INTERVAL_S, RECORD_INTERVAL_PER_NODE_S, GpuUseRecorder
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch
from rrl.tests.support.cli.story import Story
from rrl.tests.support.manager.handling import LAUNCHED, WHY, Handling
from rrl.tests.support.manager.jobs import RUN
from rrl.transport import messages as msg

N1, N2 = NodeName("n1"), NodeName("n2")


def use(busy: float) -> GpuUse:
    return GpuUse(8, busy, 2**30, 2**33)


class Recorder(GpuUseRecorder):
    """A recorder with a settable time ``now``, and its records in ``recorded``."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.recorded: list[ev.Event] = []

        async def send(*_: object) -> None: ...

        def unused() -> None:
            raise AssertionError

        record = self.recorded.append
        super().__init__(
            RunContext(RunDir(path), HealthMonitor(), unused, record, send, lambda: self.now)  # type: ignore[arg-type]
        )


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def test_record_has_the_newest_report_of_each_node_that_reported_since_the_last_one(recorder: Recorder) -> None:
    for second in range(int(GPU_USE_RECORD_INTERVAL_S) + 1):
        recorder.now = 1000.0 + second
        recorder.on_report(N1, use(second / 100))
        if second < 5:
            recorder.on_report(N2, use(0.5))
    recorder.now += GPU_USE_RECORD_INTERVAL_S
    recorder.on_report(N1, use(0.9))
    assert recorder.recorded == [
        ev.GpuUseRecorded({N1: use(GPU_USE_RECORD_INTERVAL_S / 100), N2: use(0.5)}),
        ev.GpuUseRecorded({N1: use(0.9)}),
    ]


def test_many_nodes_are_recorded_less_often(recorder: Recorder) -> None:
    nodes = [NodeName(f"n{index}") for index in range(3000)]
    for _ in range(200):
        recorder.now += 2.0
        for node in nodes:
            recorder.on_report(node, use(0.5))
    assert len(recorder.recorded) == pytest.approx(400 / (3000 * RECORD_INTERVAL_PER_NODE_S), abs=1.5)


def test_heartbeat_of_an_agent_brings_the_use_of_its_gpus_into_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.manager.intake.interval_recorders.GPU_USE_RECORD_INTERVAL_S", 0.0)
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    tag = tag_of(RUN, agent)
    handling = Handling(tmp_path, *LAUNCHED, ev.Intended(Launch(agent, tag, "pool", N1, WHY)))
    handling.handle(msg.AdmissionRequest(agent, tag, N1, 7), msg.AgentHello(agent, tag, N1, "host", 7, "boot"))
    handling.handle(msg.AgentHeartbeat(agent, N1))
    assert handling.state is not None
    assert handling.state.gpu_use == {}
    handling.handle(msg.AgentHeartbeat(agent, N1, gpu_use=use(0.5)))
    assert handling.state.gpu_use == {N1: use(0.5)}


def test_state_keeps_the_newest_record_until_the_run_is_resumed() -> None:
    story = Story().works().record(ev.GpuUseRecorded({N1: use(0.5), N2: use(0.4)}))
    story.wait(20).record(ev.GpuUseRecorded({N1: use(0.6)}))
    assert story.recorded().gpu_use == {N1: use(0.6)}
    assert story.recorded().gpu_use_at == story.now
    story.ends(Outcome.FAILED, "no time left").record(ev.Resumed("ada", "c1", story.job))
    assert story.recorded().gpu_use == {}
