"""The use of a node's GPUs, as the node's agent reports it."""

from __future__ import annotations

import pytest

from rrl.core.types import GpuUse
from rrl.health.readers.samples import Accelerator
from rrl.roles.node_agent.load_sampler import gpu_use

GIB = 2**30


def gpu(index: int, utilization: int | None = 50, used: int | None = 20 * GIB) -> Accelerator:
    return Accelerator(
        index=index, uuid=f"GPU-{index}", utilization=utilization, memory_used=used, memory_total=80 * GIB
    )


@pytest.mark.parametrize(
    ("gpus", "own", "expected"),
    [
        (None, (), None),
        ((), (), None),
        ((gpu(0, 100), gpu(1, 50)), (), GpuUse(2, 0.75, 40 * GIB, 160 * GIB)),
        ((gpu(0, 100), gpu(1, 50)), ("1",), GpuUse(1, 0.5, 20 * GIB, 80 * GIB)),
        ((gpu(0, 100), gpu(1, 50)), ("GPU-0",), GpuUse(1, 1.0, 20 * GIB, 80 * GIB)),
        ((gpu(0, 100), gpu(1, 50)), ("7",), None),
        ((gpu(0, None), gpu(1, 50)), (), GpuUse(2, 0.5, 40 * GIB, 160 * GIB)),
        ((gpu(0, None, None),), (), GpuUse(1, None, 0, 0)),
    ],
    ids=["no reading", "no GPU", "all", "by number", "by UUID", "none of ours", "partly read", "not read"],
)
def test_gpu_load_of_a_run_is_the_mean_over_its_gpus(
    gpus: tuple[Accelerator, ...] | None, own: tuple[str, ...], expected: GpuUse | None
) -> None:
    assert gpu_use(gpus, own) == expected
