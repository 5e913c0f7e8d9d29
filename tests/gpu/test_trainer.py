"""Real trainer processes on the GPU in bfloat16 that are killed and restarted end bit for bit as undisturbed ones."""

from __future__ import annotations

import asyncio
import json
import mmap
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.gpu

MODEL = {"hidden_size": 64, "intermediate_size": 128, "tokenizer": {"pieces": "0123456789="}, "dtype": "bfloat16"}
STEPS = 4


@pytest.fixture
def trainer(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a stage whose only trainer process has the GPU."""
    return {"world": 1, "steps": STEPS, "gpus": int(device.type == "cuda"), "model": MODEL}


@pytest.mark.timeout(900)  # ten processes, each of which imports its kernels and opens the GPU
@pytest.mark.parametrize("snapshots", [False, True], ids=["checkpoints", "snapshots"])
def test_trainer_killed_on_the_gpu_ends_bit_equal(
    tmp_path: Path, processes: ForkServerContext, trainer: dict[str, Any], snapshots: bool
) -> None:
    from rrl.tests.support.roles.trainer.gang_runs import dies, end_of, goes_on_from, undisturbed
    from rrl.tests.support.roles.trainer.mortal import SEALED
    from rrl.tests.support.roles.trainer.stage import Stage

    async def story() -> None:
        whole = await undisturbed(tmp_path / "whole", processes, snapshots=snapshots, **trainer)
        again = await undisturbed(tmp_path / "again", processes, snapshots=snapshots, **trainer)
        assert again == whole, "two undisturbed runs differ: this GPU's kernels are not deterministic"
        async with Stage(tmp_path / "killed", processes, snapshots=snapshots, **trainer).open() as stage:
            await dies(stage, "in the step", 2)
            await dies(stage, SEALED if snapshots else "in the files", 3)
            assert await stage.live() == [0], stage.logs()
            expected = "the snapshot of step 3 (committed: step 2)" if snapshots else "the commit of step 2"
            assert goes_on_from(stage) == expected
            assert end_of(stage) == whole

    asyncio.run(story())


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_state_on_the_gpu_fills_a_host_buffer_and_is_loaded_from_it_bit_equal(
    device: torch.device, pinned: bool
) -> None:
    """The host buffer from which checkpoints and snapshots are made includes the random state of the GPU."""
    import torch

    from rrl.roles.models.policy import build_model
    from rrl.roles.trainer.host_buffers import Layout, PinnedMemory
    from rrl.roles.trainer.learner import Learner
    from rrl.roles.trainer.process_group import Gang
    from rrl.tests.support.roles.trainer import harness

    def learner(seed: int) -> Learner:
        model = build_model(harness.SMALL, 13, seed).to(device)
        return Learner(model, harness.settings(), steps=10, temperature=1.0, gang=Gang(device=device))

    student, other = learner(1), learner(2)
    student.seed_rng(5)
    torch.rand(3, device=device)
    layout = Layout(student.tensors())
    buffer = memoryview(mmap.mmap(-1, layout.nbytes))
    pinning = PinnedMemory()
    if pinned and device.type == "cuda":
        pinning.pin(buffer)
        assert all(view.is_pinned() for view in layout.views(buffer).values())
    layout.fill(buffer, student.tensors())
    extra = student.extra_state()
    expected = torch.rand(4, device=device)
    layout.load(buffer, other.tensors())
    other.resume(extra)
    assert torch.equal(torch.rand(4, device=device), expected), "the random state of the device was not restored"
    for name, tensor in student.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    pinning.unpin(buffer)
    assert not any(view.is_pinned() for view in layout.views(buffer).values())


def test_copy_into_page_locked_memory_is_measured(device: torch.device, record: Callable[[str, str], None]) -> None:
    """The figures are only recorded, without a comparison, as this machine may be busy."""
    import torch

    from rrl.roles.trainer.host_buffers import HostBuffers, Layout, PinnedMemory

    if device.type != "cuda":
        pytest.skip("a rehearsal has no GPU memory")
    tensors = {f"w{i}": torch.randn(4096, 4096, device=device) for i in range(64)}
    layout = Layout(tensors)
    seconds: dict[str, list[float]] = {"pageable": [], "pinned": []}
    for name, pinning in (("pageable", None), ("pinned", PinnedMemory())):
        buffers = HostBuffers(own=1, pinning=pinning)
        for step in range(6):
            began = time.monotonic()
            buffer = buffers.buffer(layout.nbytes, step)
            layout.fill(buffer, tensors)
            seconds[name].append(time.monotonic() - began)
        assert all(torch.equal(view, tensors[name].cpu()) for name, view in layout.views(buffer).items())
        if pinning is not None:
            pinning.unpin(buffer)
    record("copy.json", json.dumps({"nbytes": layout.nbytes, "seconds": seconds}))
