"""An agent and the health of its node, with real readers and a fake driver, at its admission and later."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rrl.core.launch import Launch
from rrl.core.types import Cause, Finding, Verdict
from rrl.tests.support.listening_manager import Lab, Manager, eventually, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import AgentHeartbeat, AgentHello, FindingReport, Load, Stop

BUSY = ("sh", "-c", "while :; do :; done")


class Node:
    """A manager, a node with GPUs and its agent."""

    def __init__(self, at: Lab, manager: Manager, driver: FakeDriver) -> None:
        self.at, self.manager, self.driver = at, manager, driver
        self.agent: subprocess.Popen[bytes] | None = None
        self.launch: Launch | None = None

    def start(self, *readers: str, admission: float = 20.0, gpus: int = 0, patch: str = "") -> Launch:
        launch = self.at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"})
        launch = msgspec.structs.replace(launch, readers=readers, admission_timeout=admission, gpus=gpus)
        self.at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
        patch = f"import os; os.environ.update({self.driver.env()!r}); {patch}pass"
        self.agent = self.at.start(launch, "node_agent.main", patch)
        self.launch = launch
        return launch

    async def wait_for_finding(self, matches: Callable[[Finding], bool]) -> Finding:
        return (await self.manager.wait_for(FindingReport, lambda found: matches(found.finding))).finding

    def readers(self) -> list[int]:
        """Return the ids of the processes that the agent has started."""
        assert self.agent is not None
        living = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in living if _below(entry, self.agent.pid)]


def _below(entry: Path, ancestor: int) -> bool:
    try:
        parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return False
    return parent == ancestor or (parent > 1 and _below(Path("/proc") / str(parent), ancestor))


@asynccontextmanager
async def node(at: Lab, gpus: int = 2) -> AsyncIterator[Node]:
    async with at.manager() as manager:
        yield Node(at, manager, FakeDriver(at.run.path).gpus(gpus))


def test_broken_gpu_is_named_in_the_agents_hello(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.driver.set(1, "ecc_volatile_uncorrected", 3)
            lab_node.start("nvml")
            hello = await lab_node.manager.wait_for(AgentHello)
            (finding,) = [finding for finding in hello.findings if finding.verdict is Verdict.FAIL]
            assert (finding.detector, finding.cause, finding.node) == ("gpu_ecc_uncorrected", Cause.GPU, "local1")
            assert finding.component == lab_node.driver.uuid(1)
            assert 0.0 <= hello.now - finding.since < 60.0

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_only_gpus_assigned_by_slurm_must_be_free_at_admission(tmp_path: Path) -> None:
    async def found(at: Lab, given: str) -> set[str]:
        async with node(at) as lab_node:
            lab_node.driver.set(1, "memory_used", 30 * 2**30)  # used by another user
            lab_node.start("nvml", patch=f"os.environ['SLURM_STEP_GPUS'] = '{given}'; ")
            return {finding.component for finding in (await lab_node.manager.wait_for(AgentHello)).findings}

    with lab(tmp_path / "a") as at:
        assert asyncio.run(found(at, "0")) == set()
    with lab(tmp_path / "b") as at:
        assert asyncio.run(found(at, "0,1")) == {FakeDriver(at.run.path).uuid(1)}


def test_later_finding_is_sent_at_once_and_again_to_the_next_manager(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            launch = lab_node.start("nvml")
            assert (await lab_node.manager.wait_for(AgentHello)).findings == ()
            lab_node.driver.lose(0)
            lost = await lab_node.wait_for_finding(lambda finding: finding.detector == "gpu_lost")
            assert (lost.verdict, lost.proof, lost.component) == (Verdict.FAIL, True, lab_node.driver.uuid(0))
            assert (
                next(message.incarnation for message in lab_node.manager.received if isinstance(message, FindingReport))
                == launch.incarnation
            )
        async with at.manager(epoch=2) as second:
            hello = await second.wait_for(AgentHello)
            assert [finding.key for finding in hello.findings if finding.verdict is Verdict.FAIL] == [lost.key]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_hardware_lost_between_two_agents_is_found_by_the_next_one(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at, gpus=4) as lab_node:
            kept = at.run.hardware_file(lab_node.start("nvml").node)
            assert (await lab_node.manager.wait_for(AgentHello)).findings == ()
            await eventually(kept.exists)
            assert lab_node.agent is not None
            lab_node.agent.kill()
            lab_node.agent.wait()
            lab_node.driver.gpus(3)
            lab_node.start("nvml")
            hello = await lab_node.manager.wait_for(AgentHello, lambda hello: bool(hello.findings))
            assert [finding.detector for finding in hello.findings] == ["gpu_count"]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_finding_is_cleared_when_its_cause_is_gone(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.driver.set(0, "remap_pending", True)
            lab_node.start("nvml")
            (pending,) = (await lab_node.manager.wait_for(AgentHello)).findings
            assert (pending.detector, pending.verdict) == ("gpu_row_remap", Verdict.WARN)
            lab_node.driver.set(0, "remap_pending", False)
            well = await lab_node.wait_for_finding(lambda finding: finding.key == pending.key)
            assert well.verdict is Verdict.OK

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_hung_driver_delays_the_agents_hello_by_the_admission_timeout_only(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.driver.hang("nvmlInit_v2")
            lab_node.start("nvml", admission=1.0)
            assert (await lab_node.manager.wait_for(AgentHello)).findings == ()
            await lab_node.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_fewer_gpus_than_the_job_requested_fail_and_more_gpus_pass(tmp_path: Path) -> None:
    async def story(at: Lab, asked: int) -> tuple[Finding, ...]:
        async with node(at) as lab_node:
            lab_node.start("nvml", gpus=asked)
            return (await lab_node.manager.wait_for(AgentHello)).findings

    for asked, names in ((1, []), (2, []), (3, ["gpu_count"])):
        (tmp_path / str(asked)).mkdir()
        with lab(tmp_path / str(asked)) as at:
            assert [finding.detector for finding in asyncio.run(story(at, asked))] == names


def test_readers_that_cannot_start_are_reported_once_and_the_agent_continues(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.start("nvml", patch="import rrl.health.readers.isolation.client as k; k._spawn = None; ")
            (problem,) = (await lab_node.manager.wait_for(AgentHello)).findings
            assert (problem.detector, problem.verdict, problem.cause) == ("watching", Verdict.WARN, Cause.SOFTWARE)
            await lab_node.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_checks_that_raise_are_reported_once_and_the_agent_continues(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.start(
                "nvml", patch="import rrl.roles.node_agent.node_monitor as n; n.NodeChecks.evaluate = None; "
            )
            assert [finding.detector for finding in (await lab_node.manager.wait_for(AgentHello)).findings] == [
                "watching"
            ]
            lab_node.manager.received.clear()
            await lab_node.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_checks_that_raise_later_are_reported_at_that_time(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.start(
                "nvml",
                patch=(
                    "import time; import rrl.roles.node_agent.node_monitor as n; real = n.NodeChecks.evaluate; "
                    "n.NodeChecks.evaluate = lambda *given: real(*given) if time.monotonic() < until else None; "
                    "until = time.monotonic() + 6.0; "
                ),
            )
            assert (await lab_node.manager.wait_for(AgentHello)).findings == ()
            assert (
                await lab_node.wait_for_finding(lambda finding: finding.detector == "watching")
            ).verdict is Verdict.WARN

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_invalid_site_rules_are_reported_and_the_defaults_apply(tmp_path: Path) -> None:
    rules = tmp_path / "health.toml"
    rules.write_text("[expect]\ngpu = 8\n")

    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.driver.set(1, "ecc_volatile_uncorrected", 3)
            lab_node.start("nvml", patch=f"os.environ['RRL_HEALTH_CONFIG'] = {str(rules)!r}; ")
            found = {finding.detector: finding for finding in (await lab_node.manager.wait_for(AgentHello)).findings}
            assert found.keys() == {"rules", "gpu_ecc_uncorrected"}
            assert 'did you mean "gpus"?' in found["rules"].evidence[0].text

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_readers_end_with_their_agent_even_if_it_is_killed(tmp_path: Path) -> None:
    async def story(at: Lab, killed: bool) -> None:
        async with node(at) as lab_node:
            launch = lab_node.start("nvml", "host")
            await lab_node.manager.wait_for(AgentHeartbeat)
            readers = lab_node.readers()
            assert len(readers) == 2
            assert lab_node.agent is not None
            if killed:
                lab_node.agent.send_signal(signal.SIGKILL)
            else:
                await lab_node.manager.send(launch.incarnation, Stop(launch.incarnation, 1.0, "done"))
            await at.end_of(lab_node.agent)
            await eventually(lambda: not [pid for pid in readers if _is_alive(pid)])

    for killed in (False, True):
        (tmp_path / str(killed)).mkdir()
        with lab(tmp_path / str(killed)) as at:
            asyncio.run(story(at, killed))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


# ── load of steps ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_agent_reports_cpu_and_gpu_load_of_its_steps(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            busy, idle = at.launch(*BUSY, replica="rollout/0"), at.launch("sleep", "1000", replica="rollout/1")
            for launch in (busy, idle):
                at.start(launch)
            worker = await eventually(lambda: next((p.pid for p in at.processes(busy) if not p.module), 0))
            lab_node.driver.process(1, worker).set(1, "utilization", 75).set(0, "utilization", 99)
            lab_node.start("nvml")

            def of(launch: Launch, load: Callable[[Load], bool]) -> Callable[[AgentHeartbeat], bool]:
                return lambda heartbeat: any(finding.tag == launch.tag and load(finding) for finding in heartbeat.loads)

            await lab_node.manager.wait_for(AgentHeartbeat, of(busy, lambda load: load.cpu > 0.1 and load.gpu == 0.75))
            await lab_node.manager.wait_for(AgentHeartbeat, of(idle, lambda load: load.cpu < 0.1 and load.gpu is None))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_agent_without_readers_reports_cpu_load_only(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            busy = at.launch(*BUSY, env={"CUDA_VISIBLE_DEVICES": "0"})
            at.start(busy)
            lab_node.start()
            heartbeat = await lab_node.manager.wait_for(AgentHeartbeat, lambda heartbeat: bool(heartbeat.loads))
            assert [(finding.tag, finding.gpu) for finding in heartbeat.loads] == [(busy.tag, None)]
            assert lab_node.readers() == []

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_load_uses_assigned_gpus_until_a_process_computes_on_one(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as lab_node:
            lab_node.driver.set(None, "utilization", 0).set(1, "utilization", 50)
            busy = at.launch(*BUSY, env={"CUDA_VISIBLE_DEVICES": "1"})
            at.start(busy)
            lab_node.start("nvml")
            await lab_node.manager.wait_for(
                AgentHeartbeat, lambda heartbeat: any(finding.gpu == 0.5 for finding in heartbeat.loads)
            )

    with lab(tmp_path) as at:
        asyncio.run(story(at))
