"""Check the Hello of an agent for too little lockable memory, and the Hello of a role for a GPU that is in use."""

from __future__ import annotations

from collections.abc import Container

from ...core.run_spec import RunSpec
from ...core.types import (
    GUEST_ROLE,
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    Remedy,
    ReplicaId,
    Verdict,
    is_support,
    is_trainer,
    role_of,
)
from ...transport.messages import AgentHello, Hello
from ..model.state import State

MEMLOCK_DEFAULT = 8 * 2**20
"""Default RLIMIT_MEMLOCK in bytes (Linux's MLOCK_LIMIT and systemd's default; 64 KiB before Linux 5.16). RDMA locks all
registered memory, and weights need gigabytes. Open MPI's FAQ recommends "unlimited"."""


def check_memlock(hello: AgentHello, weights: str, now: float) -> Finding | None:
    """Return a WARN if a node has RDMA devices but its roles may lock no more memory than the default limit."""
    if weights == "tcp" or not hello.rdma or hello.memlock < 0 or hello.memlock > MEMLOCK_DEFAULT:
        return None
    text = (
        f"roles can lock only {hello.memlock // 2**10} KiB of memory, and RDMA ({', '.join(hello.rdma)}) must lock as"
        " much as the weights take: set LimitMEMLOCK=infinity for slurmd"
    )
    evidence = (Evidence("agent", text, now),)
    return Finding("memlock", Verdict.WARN, Cause.FABRIC, Remedy.SUPPORT, now, evidence, node=hello.node)


class GpuRegistry:
    """Registry of the incarnation that uses each GPU of each node, as the roles report it when they join.

    The registry is not journaled: a new manager fills it again from the Hello of each role. So a GPU without an owner
    is free only if no incarnation on its node is :meth:`unreported`.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[NodeName, str], Incarnation] = {}
        self._reported: set[Incarnation] = set()

    def claim(self, hello: Hello, state: State, now: float) -> Finding | None:
        """Register a joining role's GPUs; return a FAIL about the role if another current incarnation uses one of them.

        Two overlapping steps share the first GPUs of their node (measured,
        docs/architecture/clusters.md), and both would run out of memory. A guest owns no GPU: it works on those of the
        trainer, and only on those.
        """
        incarnation, node = hello.incarnation, hello.node
        guest = role_of(incarnation.replica) == GUEST_ROLE
        for gpu in hello.gpus:
            other = self._owners.get((node, gpu))
            if guest and other is not None and is_trainer(other.replica):
                continue
            if other is not None and other != incarnation and state.is_current(other):
                text = f"{incarnation} and {other} were both given GPU {gpu} of {node}"
                evidence = (Evidence("worker", text, now),)
                return Finding(
                    "gpu_taken",
                    Verdict.FAIL,
                    Cause.GPU,
                    Remedy.RESTART,
                    now,
                    evidence,
                    incarnation=incarnation,
                    proof=True,
                )
        if not guest:
            self._owners.update({(node, gpu): incarnation for gpu in hello.gpus})
        self._reported.add(incarnation)
        return None

    def unreported(
        self, incarnation: Incarnation, node: NodeName, state: State, standbys: Container[Incarnation]
    ) -> list[Incarnation]:
        """Return the other incarnations on a node that have GPUs which this manager does not know.

        The manager does not know the GPUs of two kinds of incarnations:

        * incarnations that an earlier manager launched or promoted, and that have not sent Hello to this manager;
        * incarnations that are starting in a new step, whose GPUs the cluster chooses.

        Returns [] if ``incarnation`` has its own GPUs already.

        Args:
            incarnation: The incarnation that is to get GPUs on the node.
            node: The node.
            state: The state.
            standbys: The standby processes that have reported to this manager that they are not promoted. They use only
                GPUs that this manager assigns to them.
        """
        if incarnation in self._owners.values():
            return []
        return [
            other.incarnation
            for other in state.replicas.values()
            if other.is_current
            and other.node == node
            and other.id != incarnation.replica
            and _owns_gpus(state.job, other.id)
            and other.incarnation not in self._reported
            and other.promoted_from not in standbys
        ]

    def assign(
        self, incarnation: Incarnation, node: NodeName, visible: tuple[str, ...], count: int, state: State
    ) -> tuple[str, ...]:
        """Assign ``count`` of the GPUs that are ``visible`` on a node to an incarnation that will join there.

        Skips GPUs of other current incarnations. Repeated calls return the same GPUs. Returns () if too few GPUs are
        free.
        """
        holders = {gpu: self._owners.get((node, gpu)) for gpu in visible}
        own = [gpu for gpu, holder in holders.items() if holder == incarnation]
        free = [gpu for gpu, holder in holders.items() if holder is None or not state.is_current(holder)]
        chosen = (*own, *free)[:count]
        if len(chosen) < count:
            return ()
        self._owners.update({(node, gpu): incarnation for gpu in chosen})
        return chosen


def _owns_gpus(job: RunSpec, replica: ReplicaId) -> bool:
    """Return whether a process of this replica has GPUs of its own; a standby process and a guest have none."""
    return not is_support(replica) and job.role(role_of(replica)).per_member.gpus > 0
