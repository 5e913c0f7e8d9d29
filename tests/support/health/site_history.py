"""Writes history files of a small site, for a week with several runs of several users."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rrl.core.types import Cause, Flag, Remedy, Verdict
from rrl.health.history.rates import DAY_S
from rrl.health.history.records import (
    ActionTaken,
    EvidenceLine,
    Failed,
    FindingRecord,
    NodeAcquired,
    NodeReleased,
    Record,
    RecoveryDone,
    RunEnded,
    RunStarted,
    SourcedRecord,
    encode_line,
    file_name,
)

BEGAN = 1_767_225_600.0
"""Time (s) of 2026-01-01, midnight UTC. It is in the past, because reports leave out records of the future."""
HOUR = 3600.0
GPU = "GPU-5a3c1f00-9d2e-4b11-8c07-0123456789ab"
ANNA, BEN, CARL = "anna", "ben", "carl"


def began(at: float, run: str, user: str, epoch: int = 1) -> RunStarted:
    return RunStarted(BEGAN + at, run, user, "lab", "math", epoch)


def held(at: float, *nodes: str, gpus: int = 8) -> list[Record]:
    return [NodeAcquired(BEGAN + at, node, gpus) for node in nodes]


def found(
    at: float,
    node: str,
    verdict: Verdict = Verdict.FAIL,
    *,
    cause: Cause = Cause.GPU,
    remedy: Remedy = Remedy.RESET_GPU,
    detector: str = "xid",
    text: str = "Xid 48: double-bit ECC error",
    component: str = GPU,
    incarnation: str = "",
    count: int = 1,
    proof: bool = True,
    flags: tuple[Flag, ...] = (),
) -> FindingRecord:
    evidence = (EvidenceLine(BEGAN + at, "kernel", text),) if verdict is not Verdict.OK else ()
    return FindingRecord(
        BEGAN + at,
        node,
        detector,
        verdict,
        cause,
        remedy,
        BEGAN + at,
        incarnation,
        component,
        proof,
        count,
        evidence,
        flags=flags,
    )


def failed(
    at: float,
    node: str,
    who: str = "rollout/0#1",
    *,
    cause: str = "process",
    detector: str = "exit_record",
    lost: bool = False,
    injected: bool = False,
    restarted: tuple[str, ...] | None = None,
    evidence: str = "it ended by signal 9",
) -> Failed:
    gangs = (who.partition("#")[0],) if who else ()
    restarted = gangs if restarted is None else restarted
    return Failed(
        BEGAN + at,
        node,
        who,
        restarted,
        cause,
        detector,
        "restart",
        BEGAN + at,
        node_lost=lost,
        injected=injected,
        evidence=(evidence,),
    )


def mended(at: float, replica: str, node: str, since: float, gpu_hours: float, ok: bool = True) -> RecoveryDone:
    return RecoveryDone(BEGAN + at, replica, node, BEGAN + since, gpu_hours, ok)


def acted(
    at: float,
    node: str,
    what: str,
    *,
    reason: str = "",
    cause: str = "gpu",
    by: str = "",
    outcome: str = "",
    evidence: str = "xid: Xid 48: double-bit ECC error",
) -> ActionTaken:
    return ActionTaken(BEGAN + at, node, what, reason, cause, by, outcome, (evidence,))


def left(at: float, node: str) -> NodeReleased:
    return NodeReleased(BEGAN + at, node)


def over(at: float) -> RunEnded:
    return RunEnded(BEGAN + at, "completed", "all steps are done")


def sourced(user: str, run: str, *records: Record | Sequence[Any], trusted: bool = False) -> list[SourcedRecord]:
    flat: list[Any] = [one for part in records for one in ([part] if not isinstance(part, list) else part)]
    return [SourcedRecord(user, run, one, trusted) for one in flat]


def week() -> list[SourcedRecord]:
    """Return a week of three runs on ten nodes.

    The GPU of n3 has double-bit errors for two users. n7 is lost once. n5 and n6 lose their fabric at the same time. A
    rollout crashes on n1, and one fault is injected on n2.
    """
    nodes = [f"n{i}" for i in range(1, 11)]
    reason = "rrl:math-1: gpu: Xid 48: double-bit ECC error"
    first = sourced(
        ANNA,
        "math-1",
        began(0, "math-1", ANNA),
        held(0, *nodes),
        found(DAY_S, "n3", text=f"Xid 48: double-bit ECC error on {GPU}, serial 1650924012345, boot id 77ab-1"),
        failed(DAY_S + 60, "n3", "rollout/2#1", cause="gpu", detector="xid"),
        acted(DAY_S + 61, "n3", "excluded"),
        acted(DAY_S + 62, "n3", "drain_requested", reason=reason, outcome="we may not drain nodes here"),
        mended(DAY_S + 60 + HOUR / 2, "rollout/2", "n3", DAY_S + 60, 4.0),
        failed(2 * DAY_S, "n1", "rollout/0#1"),
        mended(2 * DAY_S + 360, "rollout/0", "n1", 2 * DAY_S, 0.8),
        failed(2.5 * DAY_S, "n2", "rollout/1#1", injected=True),
        mended(2.5 * DAY_S + 360, "rollout/1", "n2", 2.5 * DAY_S, 0.8),
        found(
            3 * DAY_S,
            "n5",
            cause=Cause.FABRIC,
            remedy=Remedy.EXCLUDE,
            detector="port_state",
            component="mlx5_0/1",
            text="mlx5_0/1 is DOWN, was ACTIVE",
        ),
        found(
            3 * DAY_S + 5,
            "n6",
            cause=Cause.FABRIC,
            remedy=Remedy.EXCLUDE,
            detector="port_state",
            component="mlx5_0/1",
            text="mlx5_0/1 is DOWN, was ACTIVE",
        ),
        failed(3 * DAY_S + 10, "n5", "rollout/3#1", cause="fabric"),
        failed(3 * DAY_S + 12, "n6", "rollout/4#1", cause="fabric"),
        found(3 * DAY_S + 300, "n5", Verdict.OK, cause=Cause.FABRIC, detector="port_state", component="mlx5_0/1"),
        found(3 * DAY_S + 300, "n6", Verdict.OK, cause=Cause.FABRIC, detector="port_state", component="mlx5_0/1"),
        mended(3 * DAY_S + 310, "rollout/3", "n5", 3 * DAY_S + 10, 0.7),
        mended(3 * DAY_S + 310, "rollout/4", "n6", 3 * DAY_S + 12, 0.7),
        over(4 * DAY_S),
    )
    second = sourced(
        BEN,
        "code-2",
        began(4 * DAY_S, "code-2", BEN),
        held(4 * DAY_S, "n3", "n4", "n7"),
        found(4.5 * DAY_S, "n3", count=2, text="Xid 48: double-bit ECC error again"),
        failed(4.5 * DAY_S + 5, "n3", "rollout/0#1", cause="gpu", detector="xid"),
        acted(4.5 * DAY_S + 6, "n3", "excluded"),
        mended(4.5 * DAY_S + 1805, "rollout/0", "n3", 4.5 * DAY_S + 5, 4.0),
        failed(
            5 * DAY_S,
            "n7",
            "trainer/0#1",
            cause="node",
            detector="node_lost",
            lost=True,
            evidence="node_lost: Slurm says DOWN",
        ),
        acted(5 * DAY_S + 1, "n7", "excluded", cause="node", evidence="node_lost: Slurm says DOWN"),
        left(5 * DAY_S + 5, "n7"),
        mended(5 * DAY_S + 900, "trainer/0", "n7", 5 * DAY_S, 2.0),
        over(6 * DAY_S),
    )
    third = sourced(
        CARL,
        "eval-3",
        began(5 * DAY_S, "eval-3", CARL),
        held(5 * DAY_S, "n8", "n9"),
        failed(5.5 * DAY_S, "n8", "rollout/0#1", cause="user", detector="refusal"),
        over(6 * DAY_S),
    )
    return [*first, *second, *third]


def write(folder: Path, user: str, run: str, records: Iterable[Record], epoch: int = 1) -> Path:
    """Write one file of a history folder."""
    path = folder / user / file_name(run, epoch)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, records)))
    return path
