"""Judge what a node or a role reports when it joins: too little memory to lock, a GPU that another role has."""

from __future__ import annotations

from ...core.types import Cause, Evidence, Finding, Incarnation, NodeName, Remedy, Verdict
from ...transport.messages import AgentHello, Hello
from ..model.state import State

MEMLOCK_DEFAULT = 8 * 2**20
"""Bytes: RLIMIT_MEMLOCK where nobody raised it (Linux's MLOCK_LIMIT and systemd's default; 64 KiB before 5.16).
Whatever RDMA registers is locked, which for weights is gigabytes; Open MPI's FAQ asks for "unlimited"."""


def check_memlock(hello: AgentHello, weights: str, now: float) -> Finding | None:
    """WARN where a node has RDMA devices, but roles may lock no more memory than by default."""
    if weights == "tcp" or not hello.rdma or hello.memlock < 0 or hello.memlock > MEMLOCK_DEFAULT:
        return None
    text = (
        f"roles may lock {hello.memlock // 2**10} KiB of memory here, and RDMA ({', '.join(hello.rdma)}) needs what the"
        " weights take: set LimitMEMLOCK=infinity for slurmd"
    )
    evidence = (Evidence("agent", text, now),)
    return Finding("memlock", Verdict.WARN, Cause.FABRIC, Remedy.SUPPORT, now, evidence, node=hello.node)


class GpuRegistry:
    """Which life has which GPU of which node, as roles say when they join. A new manager hears it from all again."""

    def __init__(self) -> None:
        self._owners: dict[tuple[NodeName, str], Incarnation] = {}

    def claim(self, hello: Hello, state: State, now: float) -> Finding | None:
        """FAIL, about who joins, where another believed life has one of its GPUs: a step that overlaps shares the first
        ones with all others (measured, docs/architecture.md), and both would run out of memory."""
        incarnation, node = hello.incarnation, hello.node
        for gpu in hello.gpus:
            other = self._owners.get((node, gpu))
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
        self._owners.update({(node, gpu): incarnation for gpu in hello.gpus})
        return None

    def assign(
        self, incarnation: Incarnation, node: NodeName, visible: tuple[str, ...], count: int, state: State
    ) -> tuple[str, ...]:
        """``count`` of the GPUs that are ``visible`` on a node, for a life that will join there: none that another
        believed life has said to have. The same ones when it is asked again; none at all where there are too few."""
        holders = {gpu: self._owners.get((node, gpu)) for gpu in visible}
        own = [gpu for gpu, holder in holders.items() if holder == incarnation]
        free = [gpu for gpu, holder in holders.items() if holder is None or not state.is_current(holder)]
        chosen = (*own, *free)[:count]
        if len(chosen) < count:
            return ()
        self._owners.update({(node, gpu): incarnation for gpu in chosen})
        return chosen
