"""The rollout's engine on the GPU, with weights that come from the trainer's GPU memory through host memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rrl.core.types import Version

if TYPE_CHECKING:
    import torch

    from rrl.roles.trainer.learner import Learner
    from rrl.transport.weights.store import WeightStore

pytestmark = pytest.mark.gpu

ATOL = 2e-3
"""Largest difference of log-probabilities (nats) between one pass with a cache and one without.

The passes are in float32 on a GPU whose matrix products may use TF32 (ten bits of mantissa).
"""
CHUNK = 2**16


def published(student: Learner, version: Version, dtype: torch.dtype) -> WeightStore:
    """Return a store that serves the learner's weights as the trainer publishes them at its start."""
    from rrl.roles.trainer.process_group import Gang
    from rrl.roles.trainer.publisher import Publisher
    from rrl.tests.support.roles.trainer.publishing import PublishingWorker

    worker: Any = PublishingWorker(chunk=CHUNK)
    publisher = Publisher(worker, Gang(), student, dtype)
    publisher.publish_live(version.step)
    publisher.finish()
    store: WeightStore = worker.store
    return store


def pulled(source: WeightStore, version: Version) -> WeightStore:
    """Return the store of a rollout that has pulled the version over TCP."""
    from rrl.tests.support.weights.transports import served, transport_for, weight_source
    from rrl.transport.weights.pull import pull
    from rrl.transport.weights.store import WeightStore

    async def story() -> WeightStore:
        mine = WeightStore()
        async with served("tcp", source) as address, transport_for("tcp") as transport:
            await pull(mine, version, lambda: [weight_source(address, version=version)], transport)
        return mine

    return asyncio.run(story())


def learner(device: torch.device, seed: int) -> Learner:
    from rrl.roles.models.policy import build_model
    from rrl.roles.trainer.learner import Learner
    from rrl.roles.trainer.process_group import Gang
    from rrl.tests.support.roles.trainer import harness

    model = build_model(harness.SMALL, 13, seed).to(device)
    return Learner(model, harness.settings(), steps=10, temperature=1.0, gang=Gang(device=device))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_gpu_memory_arrive_bit_equal_in_another_models_gpu_memory(device: torch.device, dtype: str) -> None:
    import torch

    from rrl.roles.models.policy import build_model, load_weights
    from rrl.roles.models.tensors import unpack
    from rrl.tests.support.roles.trainer import harness

    sent: torch.dtype = getattr(torch, dtype)
    student, version = learner(device, 1), Version(1, 1)
    stored = pulled(published(student, version, sent), version).get(version)
    assert stored is not None
    model = build_model(harness.SMALL, 13, seed=2).to(device=device, dtype=sent)
    load_weights(model, unpack(stored.manifest.tensors, stored.flat))
    expected = {name: tensor.detach().to(sent) for name, tensor in student.weights().items()}
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name].detach(), tensor) for name, tensor in expected.items())
    assert all(parameter.device.type == device.type for parameter in found.values())


def test_new_weights_while_the_engine_generates_change_the_following_segments_only(device: torch.device) -> None:
    import torch

    from rrl.roles.models.policy import build_model
    from rrl.roles.models.tensors import unpack
    from rrl.roles.rollout.engine import Sampling
    from rrl.roles.rollout.torch_engine import TorchEngine
    from rrl.roles.trajectories.types import Item, Segment
    from rrl.tests.support.roles.trainer import harness

    learners = {Version(step, 1): learner(device, seed=step + 1) for step in range(3)}
    engine = TorchEngine(
        build_model(harness.SMALL, 13, seed=77).to(device),
        stop_tokens=frozenset({13}),
        seed=3,
        sampling=Sampling(segment_tokens=4),
    )
    items = [Item(n, n, tuple(2 + (n + place) % 10 for place in range(3 + n % 4)), max_new=12) for n in range(8)]
    segments: dict[int, list[Segment]] = {item.trajectory: [] for item in items}
    for version, student in learners.items():
        stored = pulled(published(student, version, torch.float32), version).get(version)
        assert stored is not None
        engine.load(version, unpack(stored.manifest.tensors, stored.flat))
        engine.probe()
        if not engine.has_work:
            engine.add(items)
        for segment in engine.step()[0]:
            segments[segment.trajectory].append(segment)
    assert not engine.has_work
    for item in items:
        assert [segment.version for segment in segments[item.trajectory]] == list(learners)
        tokens = list(item.prompt)
        for segment in segments[item.trajectory]:
            expected = _log_probabilities(learners[segment.version], tokens, segment.tokens, device)
            assert torch.allclose(expected, torch.tensor(segment.logprobs), atol=ATOL), segment.version
            tokens += segment.tokens


def _log_probabilities(
    student: Learner, prefix: list[int], tokens: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return the log-probabilities of ``tokens`` after ``prefix`` by one plain forward pass."""
    import torch

    whole = torch.tensor([[*prefix, *tokens]], device=device)
    with torch.no_grad():
        logits = student.model(input_ids=whole[:, :-1], use_cache=False).logits[0, len(prefix) - 1 :]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, whole[0, len(prefix) :, None])[:, 0].cpu()
    return found
