"""An agent and its node's health: real readers against a stand-in driver, found out before the first word and after."""

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
        self.agent = self.at.start(launch, "agent.main", patch)
        self.launch = launch
        return launch

    async def finds(self, which: Callable[[Finding], bool]) -> Finding:
        return (await self.manager.wait_for(FindingReport, lambda found: which(found.finding))).finding

    def readers(self) -> list[int]:
        """Processes that the agent has started."""
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


def test_a_broken_gpu_is_named_in_the_first_word_of_its_agent(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.driver.set(1, "ecc_volatile_uncorrected", 3)
            here.start("nvml")
            hello = await here.manager.wait_for(AgentHello)
            (finding,) = [one for one in hello.findings if one.verdict is Verdict.FAIL]
            assert (finding.detector, finding.cause, finding.node) == ("gpu_ecc_uncorrected", Cause.GPU, "local1")
            assert finding.component == here.driver.uuid(1)
            assert 0.0 <= hello.now - finding.since < 60.0

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_only_the_gpus_that_slurm_gave_must_be_free_when_an_agent_begins(tmp_path: Path) -> None:
    async def found(at: Lab, given: str) -> set[str]:
        async with node(at) as here:
            here.driver.set(1, "memory_used", 30 * 2**30)  # another user's
            here.start("nvml", patch=f"os.environ['SLURM_STEP_GPUS'] = '{given}'; ")
            return {one.component for one in (await here.manager.wait_for(AgentHello)).findings}

    with lab(tmp_path / "a") as at:
        assert asyncio.run(found(at, "0")) == set()
    with lab(tmp_path / "b") as at:
        assert asyncio.run(found(at, "0,1")) == {FakeDriver(at.run.path).uuid(1)}


def test_what_goes_wrong_later_is_told_at_once_and_again_to_the_next_manager(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            launch = here.start("nvml")
            assert (await here.manager.wait_for(AgentHello)).findings == ()
            here.driver.lose(0)
            lost = await here.finds(lambda one: one.detector == "gpu_lost")
            assert (lost.verdict, lost.proof, lost.component) == (Verdict.FAIL, True, here.driver.uuid(0))
            assert (
                next(one.incarnation for one in here.manager.received if isinstance(one, FindingReport))
                == launch.incarnation
            )
        async with at.manager(epoch=2) as second:
            hello = await second.wait_for(AgentHello)
            assert [one.key for one in hello.findings if one.verdict is Verdict.FAIL] == [lost.key]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_what_was_lost_while_no_agent_was_there_is_found_by_the_next_one(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at, gpus=4) as here:
            kept = at.run.hardware_file(here.start("nvml").node)
            assert (await here.manager.wait_for(AgentHello)).findings == ()
            await eventually(kept.exists)
            assert here.agent is not None
            here.agent.kill()
            here.agent.wait()
            here.driver.gpus(3)
            here.start("nvml")
            hello = await here.manager.wait_for(AgentHello, lambda hello: bool(hello.findings))
            assert [one.detector for one in hello.findings] == ["gpu_count"]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_what_is_well_again_is_cleared(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.driver.set(0, "remap_pending", True)
            here.start("nvml")
            (pending,) = (await here.manager.wait_for(AgentHello)).findings
            assert (pending.detector, pending.verdict) == ("gpu_row_remap", Verdict.WARN)
            here.driver.set(0, "remap_pending", False)
            well = await here.finds(lambda one: one.key == pending.key)
            assert well.verdict is Verdict.OK

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_a_driver_that_hangs_holds_the_agents_first_word_no_longer_than_it_may(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.driver.hang("nvmlInit_v2")
            here.start("nvml", admission=1.0)
            assert (await here.manager.wait_for(AgentHello)).findings == ()
            await here.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_fewer_gpus_than_the_job_asked_for_are_a_failure_and_more_are_none(tmp_path: Path) -> None:
    async def story(at: Lab, asked: int) -> tuple[Finding, ...]:
        async with node(at) as here:
            here.start("nvml", gpus=asked)
            return (await here.manager.wait_for(AgentHello)).findings

    for asked, names in ((1, []), (2, []), (3, ["gpu_count"])):
        (tmp_path / str(asked)).mkdir()
        with lab(tmp_path / str(asked)) as at:
            assert [one.detector for one in asyncio.run(story(at, asked))] == names


def test_readers_that_cannot_be_started_are_said_once_and_the_agent_goes_on(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.start("nvml", patch="import rrl.health.readers.isolation.client as k; k._spawn = None; ")
            (trouble,) = (await here.manager.wait_for(AgentHello)).findings
            assert (trouble.detector, trouble.verdict, trouble.cause) == ("watching", Verdict.WARN, Cause.SOFTWARE)
            await here.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_checks_that_fail_are_said_once_and_the_agent_goes_on(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.start("nvml", patch="import rrl.roles.agent.node_monitor as n; n.evaluate = None; ")
            assert [one.detector for one in (await here.manager.wait_for(AgentHello)).findings] == ["watching"]
            here.manager.received.clear()
            await here.manager.wait_for(AgentHeartbeat)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_checks_that_fail_later_are_said_then(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.start("nvml", patch=(
                "import time; import rrl.roles.agent.node_monitor as n; real = n.evaluate; "
                "n.evaluate = lambda *given: real(*given) if time.monotonic() < until else None; "
                "until = time.monotonic() + 6.0; "
            ))  # fmt: skip
            assert (await here.manager.wait_for(AgentHello)).findings == ()
            assert (await here.finds(lambda one: one.detector == "watching")).verdict is Verdict.WARN

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_rules_of_the_site_that_are_wrong_are_told_and_the_defaults_hold(tmp_path: Path) -> None:
    rules = tmp_path / "health.toml"
    rules.write_text("[expect]\ngpu = 8\n")

    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.driver.set(1, "ecc_volatile_uncorrected", 3)
            here.start("nvml", patch=f"os.environ['RRL_HEALTH_CONFIG'] = {str(rules)!r}; ")
            found = {one.detector: one for one in (await here.manager.wait_for(AgentHello)).findings}
            assert found.keys() == {"rules", "gpu_ecc_uncorrected"}
            assert 'did you mean "gpus"?' in found["rules"].evidence[0].text

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_readers_end_with_their_agent_also_when_it_is_killed(tmp_path: Path) -> None:
    async def story(at: Lab, killed: bool) -> None:
        async with node(at) as here:
            launch = here.start("nvml", "host")
            await here.manager.wait_for(AgentHeartbeat)
            readers = here.readers()
            assert len(readers) >= 3
            assert here.agent is not None
            if killed:
                here.agent.send_signal(signal.SIGKILL)
            else:
                await here.manager.send(launch.incarnation, Stop(launch.incarnation, 1.0, "done"))
            await at.end_of(here.agent)
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


# ── what steps take ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_agent_tells_what_its_steps_take_of_cpu_and_gpu(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            busy, idle = at.launch(*BUSY, replica="rollout/0"), at.launch("sleep", "1000", replica="rollout/1")
            for launch in (busy, idle):
                at.start(launch)
            worker = await eventually(lambda: next((p.pid for p in at.processes(busy) if not p.module), 0))
            here.driver.process(1, worker).set(1, "utilization", 75).set(0, "utilization", 99)
            here.start("nvml")

            def of(launch: Launch, load: Callable[[Load], bool]) -> Callable[[AgentHeartbeat], bool]:
                return lambda heartbeat: any(one.tag == launch.tag and load(one) for one in heartbeat.loads)

            await here.manager.wait_for(AgentHeartbeat, of(busy, lambda load: load.cpu > 0.1 and load.gpu == 0.75))
            await here.manager.wait_for(AgentHeartbeat, of(idle, lambda load: load.cpu < 0.1 and load.gpu is None))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_without_readers_cpu_is_told_and_nothing_of_gpus(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            busy = at.launch(*BUSY, env={"CUDA_VISIBLE_DEVICES": "0"})
            at.start(busy)
            here.start()
            heartbeat = await here.manager.wait_for(AgentHeartbeat, lambda heartbeat: bool(heartbeat.loads))
            assert [(one.tag, one.gpu) for one in heartbeat.loads] == [(busy.tag, None)]
            assert here.readers() == []

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_a_step_is_told_with_the_gpus_that_it_was_given_until_a_process_computes_on_one(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with node(at) as here:
            here.driver.set(None, "utilization", 0).set(1, "utilization", 50)
            busy = at.launch(*BUSY, env={"CUDA_VISIBLE_DEVICES": "1"})
            at.start(busy)
            here.start("nvml")
            await here.manager.wait_for(
                AgentHeartbeat, lambda heartbeat: any(one.gpu == 0.5 for one in heartbeat.loads)
            )

    with lab(tmp_path) as at:
        asyncio.run(story(at))
