"""The node's part of a role's environment: address, gloo, NCCL and UCX variables, GPUs, limits, image variables."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import ExitReason, ExitRecord, Launch
from rrl.core.processes import MAX_NOFILE
from rrl.core.role_environment import EnvSpec, prelude
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, NodeName, ReplicaId, guest_id
from rrl.health.readers.base import ACCELERATOR_READERS
from rrl.roles.launcher import gpus
from rrl.roles.launcher.environment import node_environment, rdma_devices, see_all_gpus, ucx_devices
from rrl.roles.launcher.gpus import NodeGpus, assigned_gpus, assigned_gpus_with_timeout
from rrl.tests.support.health.fake_vendor import FAKE_ROW
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.transport.address import NoAddress, interfaces
from rrl.transport.messages import AgentHello

HOSTILE = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "64",
    "SLURM_PROCID": "5",
    "PMI_RANK": "5",
    "PMIX_RANK": "5",
    "OMPI_COMM_WORLD_RANK": "5",
    "SLURMD_NODENAME": "n1",
}
"""Variables by which torch, Hugging Face and mpi4py would conclude that their launcher has started the process."""


def launch(**changes: object) -> Launch:
    incarnation = Incarnation(ReplicaId("rollout/0"), 1)
    return msgspec.structs.replace(
        Launch("run.rollout-0.1", "/run", incarnation, NodeName("n1"), (), {"PATH": "/bin"}, "/", 1.0, True), **changes
    )


def rewrite(at: Lab, made: Launch, **changes: object) -> Launch:
    """Write the launch file again with changed fields."""
    made = msgspec.structs.replace(made, **changes)
    write_atomically(at.run.launch_file(made.tag), msgspec.json.encode(made))
    return made


@pytest.mark.parametrize("in_image", [False, True])
def test_variables_of_the_launcher_do_not_reach_a_role(monkeypatch: pytest.MonkeyPatch, in_image: bool) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OF_THE_IMAGE", "1")
    environment = node_environment(launch(in_image=in_image, network="lo"))
    assert not environment.keys() & HOSTILE.keys()
    assert ("OF_THE_IMAGE" in environment) is in_image
    assert environment["PATH"] == "/bin"


def test_chosen_interface_is_set_for_gloo_nccl_and_ucx_unless_the_role_sets_one() -> None:
    environment = node_environment(launch(network="127.0.0.0/8", env={"NCCL_SOCKET_IFNAME": "ib3"}))
    assert (environment["RRL_ADDRESS"], environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert environment["NCCL_SOCKET_IFNAME"] == "ib3"
    assert node_environment(launch(network="lo"))["NCCL_SOCKET_IFNAME"] == "=lo"


def test_libraries_choose_their_interface_without_a_configured_network() -> None:
    assert node_environment(launch()) == {"PATH": "/bin", "RRL_ADDRESS": "127.0.0.1"}


def test_role_on_a_node_of_its_own_listens_where_other_nodes_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.roles.launcher.environment.own_address", lambda: "10.0.0.7")
    assert node_environment(launch(virtual_node=False))["RRL_ADDRESS"] == "10.0.0.7"


def test_ucx_keeps_rdma_for_every_chosen_interface(tmp_path: Path) -> None:
    assert ucx_devices("eth0", tmp_path) == "eth0"
    (tmp_path / "net/ib0/device/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "net/ib0/dev_port").write_text("1\n")
    (tmp_path / "infiniband/mlx5_0").mkdir(parents=True)
    assert rdma_devices(tmp_path) == ("mlx5_0",)
    assert ucx_devices("ib0", tmp_path) == "mlx5_0:2,ib0"
    assert ucx_devices("eth0", tmp_path) == ""


def test_step_names_its_gpus_by_slurms_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_GPUS", "2,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment = node_environment(launch(gpus=2, network="lo"))
    assert (environment["RRL_GPUS"], environment["CUDA_VISIBLE_DEVICES"]) == ("2,3", "0,1")
    assert assigned_gpus(environment) == ("2", "3")  # without a driver, the launcher cannot turn numbers into UUIDs
    assert assigned_gpus({}) == ()
    assert "RRL_GPUS" not in node_environment(launch(network="lo"))


@pytest.mark.parametrize(("slot", "numbers", "visible"), [(0, "4,5", "0,1"), (1, "6,7", "2,3")])
def test_guests_of_a_node_share_the_gpus_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, slot: int, numbers: str, visible: str
) -> None:
    monkeypatch.setenv("SLURM_STEP_GPUS", "4,5,6,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    guest = Incarnation(guest_id(NodeName("n1"), slot), 1)
    environment = node_environment(launch(gpus=2, network="lo", incarnation=guest))
    assert (environment["RRL_GPUS"], environment["CUDA_VISIBLE_DEVICES"]) == (numbers, visible)
    alone = Incarnation(guest_id(NodeName("n1")), 1)
    assert node_environment(launch(gpus=4, network="lo", incarnation=alone))["RRL_GPUS"] == "4,5,6,7"


def test_gpus_of_any_vendor_are_named_by_uuid_from_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES numbers the GPUs that the process may open. The fake vendor's second GPU computes."""
    monkeypatch.setattr(gpus, "ACCELERATOR_READERS", {**ACCELERATOR_READERS, "fake": FAKE_ROW})
    assert assigned_gpus({"RRL_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "0,1"}) == ("FAKE-0", "FAKE-1")
    assert assigned_gpus({"RRL_GPUS": "6", "CUDA_VISIBLE_DEVICES": "GPU-x"}) == ("GPU-x",)
    assert assigned_gpus({"RRL_GPUS": "6", "CUDA_VISIBLE_DEVICES": "2"}) == ("6",), "the driver has no third GPU"
    assert assigned_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == ()
    for visible, busy in (("0", False), ("0,1", True), ("FAKE-1", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert NodeGpus().any_busy() is busy


def test_step_on_a_node_without_the_network_names_the_existing_ones(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            made = rewrite(at, at.launch("touch", str(tmp_path / "started")), network="203.0.113.0/24")
            at.start(made)
            report = await manager.wait_for(ExitRecord)
            names = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces())
            assert report.reason is ExitReason.NOT_STARTED
            assert report.detail == f"no interface with an address in 203.0.113.0/24; there are {names}"
            assert not (tmp_path / "started").exists()

    with lab(tmp_path) as at:
        asyncio.run(story(at))
    with pytest.raises(NoAddress):
        node_environment(launch(network="nonesuch0"))


def test_role_has_raised_memlock_and_nofile_limits_and_no_core_dumps(tmp_path: Path) -> None:
    look = "import json, resource as r; print(json.dumps([r.getrlimit(n) for n in (r.RLIMIT_MEMLOCK, r.RLIMIT_NOFILE,"
    look += " r.RLIMIT_CORE)]))"

    async def story(at: Lab) -> None:
        async with at.manager():
            made = at.launch(sys.executable, "-c", look)
            lower = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 4096));"
            lower += " r.setrlimit(r.RLIMIT_MEMLOCK, (65536, 1 << 20))"
            await at.end_of(at.start(made, patch=lower))
            assert json.loads(at.log(made)) == [[1 << 20, 1 << 20], [4096, 4096], [0, 0]]

    with lab(tmp_path) as at:
        asyncio.run(story(at))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= MAX_NOFILE


async def test_setup_variables_reach_the_role_and_setup_output_is_logged(at: Lab) -> None:
    async with at.manager() as manager:
        text = prelude(EnvSpec(setup=("export SET=up", "echo loading >&2")))
        made = rewrite(at, at.launch("sh", "-c", "echo $SET $PWD; exit 5"), setup=text)
        at.start(made)
        report = await manager.wait_for(ExitRecord)
        assert (report.code, report.reason) == (5, ExitReason.EXITED)
        await eventually(lambda: f"up {made.cwd}" in at.log(made))
        assert "loading" in at.log(made)


async def test_failed_setup_line_is_the_reason_in_the_exit_record(at: Lab, tmp_path: Path) -> None:
    async with at.manager() as manager:
        text = prelude(EnvSpec(setup=("sleep 1002 & true", "ls /no/such/place")))
        made = rewrite(at, at.launch("touch", str(tmp_path / "started"), env={"LC_ALL": "C"}), setup=text)
        step = at.start(made)
        report = await manager.wait_for(ExitRecord)
        assert report.reason is ExitReason.NOT_STARTED
        assert report.detail.startswith("[env] setup line 2 failed (exit 2): ls: cannot access '/no/such/pl")
        record = at.record(made)
        assert record is not None
        assert (record.reason, record.detail) == (report.reason, report.detail)
        await at.end_of(step)
        assert not at.processes(made)  # the background process of the first setup line has ended, too
        assert not (tmp_path / "started").exists()


async def test_stop_during_setup_is_recorded_as_stopped(at: Lab, tmp_path: Path) -> None:
    async with at.manager() as manager:
        text = prelude(EnvSpec(setup=(f"touch {tmp_path}/there; sleep 1003",)))
        made = rewrite(at, at.launch("true", grace=0.5), setup=text)
        step = at.start(made)
        await eventually((tmp_path / "there").exists)
        step.terminate()
        assert (await manager.wait_for(ExitRecord)).reason == ExitReason.STOPPED


@pytest.mark.parametrize(
    ("setup", "probe", "expected_text"),
    [
        ((), "import json, asyncio", ""),
        (("(setsid sleep 1006 &)",), "import json", ""),
        (("export PYTHONPATH=/opt/x",), "import os; assert os.environ['PYTHONPATH'] == '/opt/x'", ""),
        ((), "import os; os.path.exists('once') or (open('once', 'w'), 1 / 0)", ""),  # the second try counts
        ((), "import json, no_such_module", "failed (exit 1): ModuleNotFoundError: No module named 'no_such_module'"),
        (("source /no/such/profile",), "", "[env] setup line 1 failed (exit 1): "),
        ((), "import time; time.sleep(1004)", "did not end within 0.3 s"),
    ],
)
async def test_agent_reports_a_failed_import_probe_in_its_hello(
    at: Lab, setup: tuple[str, ...], probe: str, expected_text: str
) -> None:
    async with at.manager() as manager:
        made = at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"})
        within = 0.3 if "did not end" in expected_text else 60.0
        made = rewrite(
            at, made, setup=prelude(EnvSpec(setup=setup)), probe=(sys.executable, "-c", probe), probe_timeout=within
        )
        agent = at.start(made, "node_agent.main")
        hello = await manager.wait_for(AgentHello)
        assert expected_text in hello.probe if expected_text else hello.probe == ""
        assert "\n" not in hello.probe
        assert [process.pid for process in at.processes(made)] == [agent.pid], "a process of the probe has outlived it"


async def test_agent_without_the_network_reports_that_and_its_limits(at: Lab) -> None:
    async with at.manager() as manager:
        made = rewrite(
            at, at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), network="nonesuch0"
        )
        lower = "import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (65536, 1 << 20))"
        at.start(made, "node_agent.main", patch=lower)
        hello = await manager.wait_for(AgentHello)
        assert hello.probe.startswith("no interface nonesuch0 with an IPv4 address; there are lo 127.0.0.1")
        assert hello.memlock == 1 << 20
        assert hello.nofile > 0
        assert hello.rdma == rdma_devices()


def test_agent_sees_all_gpus_of_its_node() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    see_all_gpus()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


async def test_gpu_query_does_not_lose_a_cancellation() -> None:
    """asyncio.wait_for of Python 3.11 may lose a cancellation that arrives at its end.

    The exit of a role that ends at once would then never be reported.
    """

    async def query() -> None:
        await assigned_gpus_with_timeout({})
        await asyncio.Event().wait()

    for turn in range(2000):
        querying = asyncio.create_task(query())
        for _ in range(turn % 40):
            await asyncio.sleep(0)
        querying.cancel()
        assert (await asyncio.wait([querying], timeout=30.0))[0], "the cancelled query continues"
