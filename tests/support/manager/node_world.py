"""A virtual cluster (:mod:`.world`) that drains, undrains and releases single nodes, as Slurm does."""

from __future__ import annotations

import msgspec

from rrl.cluster.base import AllocationState, AllocationStatus, NodeState, NodeStatus
from rrl.core.run_spec import RunSpec
from rrl.core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, ExternalAction, Shrink, Undrain
from rrl.tests.support.manager.world import World

UP = NodeStatus(NodeState.UP, "MIXED")


class Nodes(World):
    """A Slurm whose nodes can be drained, if that is allowed, and that can release single nodes."""

    cluster = "slurm"

    def __init__(self, job: RunSpec, nodes: int | None = None, may: bool = True) -> None:
        self.drains: dict[NodeName, str] = {}
        self.may = may
        self.shrinks = ""
        """Reason with which the cluster refuses to release single nodes; empty if it releases them."""
        self.unanswered = False
        """True if requests to drain, undrain and release single nodes get no answer."""
        super().__init__(msgspec.structs.replace(job, cluster=self.cluster), nodes)

    def _carry_out(self, action: ExternalAction) -> None:
        if not isinstance(action, Drain | Undrain | Shrink):
            super()._carry_out(action)
            return
        if self.unanswered:
            return
        refused = "" if isinstance(action, Shrink) or self.may else "we may not drain nodes here"
        refused = self.shrinks if isinstance(action, Shrink) else refused
        self._later(0.1, lambda: self.record(ev.IntentSettled(action.tag, not refused, refused)))
        if refused:
            return
        if isinstance(action, Drain):
            self.drains[action.node] = action.reason
            self.set_state(action.node, NodeState.DRAINING, f"MIXED+DRAIN: {action.reason}")
        elif isinstance(action, Undrain):
            assert self.drains.pop(action.node, action.reason) == action.reason
            self.set_state(action.node, NodeState.UP, "IDLE")
        else:
            rest = tuple(node for node in self.held[action.allocation] if node not in action.nodes)
            self.held[action.allocation] = rest
            self.steps = {tag: step for tag, step in self.steps.items() if step[1] not in action.nodes}
            status = AllocationStatus(AllocationState.RUNNING, "7", rest)
            self._later(0.5, lambda: self.record(ev.AllocationChanged(action.allocation, status)))

    def set_state(self, node: NodeName, state: NodeState, detail: str) -> None:
        """Make the cluster report this state of the node from the next poll on."""
        self._later(
            0.2, lambda: self.record(ev.NodeChanged(node, NodeStatus(state, detail, detail.partition(": ")[2])))
        )

    def all_up(self) -> Nodes:
        for node in self.state.nodes:
            self.happen(ev.NodeChanged(node, UP))
        return self

    def exclude(
        self,
        node: NodeName,
        cause: Cause,
        proof: bool = True,
        verdict: Verdict = Verdict.FAIL,
        remedy: Remedy = Remedy.DRAIN,
        component: str = "",
    ) -> None:
        evidence = (Evidence("agent", "Xid 79, GPU 3 has fallen off the bus", self.now),)
        finding = Finding(
            "xid", verdict, cause, remedy, self.now, evidence, node=node, proof=proof, component=component
        )
        self.happen(ev.FindingChanged(finding))

    def send_command(self, command: str, node: NodeName, reason: str = "") -> None:
        self.happen(ev.CommandReceived(command, "anna", f"c{len(self.events)}", node, reason=reason))

    def tags(self, *kinds: type) -> list[str]:
        return [action.tag for action in self.actions if isinstance(action, kinds)]
