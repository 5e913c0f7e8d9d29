"""Hardware that is lost after one agent of a node has ended is found by the node's next agent."""

from __future__ import annotations

from rrl.core.types import Verdict
from rrl.health.checks.node_state import HardwareInventory, NodeState, hardware_inventory, restore_inventory
from rrl.health.readers.samples import FabricData, NvLink
from rrl.tests.support.health.simulated_node import ObservedNode, gpu, port

UP = port("mlx5_2")
DOWN = port("mlx5_2", state="DOWN", physical="Polling")


def agent(past: HardwareInventory | None = None, boot: str = "b1") -> ObservedNode:
    node = ObservedNode()
    node.node_state.boot_id = boot
    if past is not None:
        restore_inventory(node.node_state, past)
    return node


def restored_state() -> HardwareInventory:
    links = (NvLink(link=0, active=True), NvLink(link=1, active=True))
    return hardware_inventory(agent().reads(FabricData(ports=(UP,))).gpus(gpu(0, nvlinks=links)).node_state)


def test_next_agent_restores_the_hardware_inventory() -> None:
    past = restored_state()
    assert (past.gpus, past.hcas, past.ports_up) == (2, ("mlx5_2",), ("mlx5_2/1",))
    assert past.links_up["GPU-0"] == (0, 1)
    assert hardware_inventory(agent(past).node_state) == past


def test_port_that_went_down_between_two_agents_is_found() -> None:
    for past, found in ((restored_state(), True), (None, False)):
        node = agent(past).reads(FabricData(ports=(DOWN,)), times=60, every=5.0)
        assert any(one.verdict in (Verdict.WARN, Verdict.FAIL) and "mlx5_2" in str(one) for one in node.found) is found


def test_inventory_is_reset_after_another_boot_or_an_unknown_boot() -> None:
    for boot in ("b2", ""):
        assert hardware_inventory(agent(restored_state(), boot).node_state) == HardwareInventory(boot)
    unknown = NodeState()
    restore_inventory(unknown, HardwareInventory("", gpus=8))
    assert unknown.max_gpus == 0


def test_gpu_inventory_of_another_job_is_not_restored() -> None:
    past = hardware_inventory(agent().gpus().node_state, "4711")
    for job, gpus in (("4711", 2), ("4712", 0)):
        node = agent()
        restore_inventory(node.node_state, past, job)
        assert node.node_state.max_gpus == gpus
