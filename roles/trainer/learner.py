"""The learner: a model, its optimizer, and policy-gradient steps on batches of trajectories, independent of a run.

A step is trained part by part: :meth:`Learner.open`, :meth:`Learner.add` for each part, :meth:`Learner.close`. A part
has whole groups, because an advantage compares the trajectories of a group. The parts together make the same step as
one part with the whole batch, up to rounding. The same parts in the same order give the same bits.

In a gang each member trains on its share of each part, and all together make the same step as one process would.
Everything that the next step depends on is in :meth:`Learner.tensors` and :meth:`Learner.extra_state`: a learner
restored from them continues bit for bit as if uninterrupted. If anything were missing, the next step would differ
(docs/sources.md, torch). The gradients of an unfinished step are not included, so its parts must be added again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Literal, TypeVar

import msgspec
import numpy
import torch
from msgspec import Struct, field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.run_spec import TrainerSettings
from ..checkpoints.folders import StoredFiles
from ..checkpoints.stored_tensors import WEIGHTS_PREFIX
from ..launcher.end_report import Unrepairable
from ..models.policy import trained_parameters, weights
from ..trajectories.batches import Part
from ..trajectories.partition import micro_batches, partition
from ..trajectories.types import Trajectory
from .adapters import Adapters
from .host_buffers import shard_of
from .likelihood import likelihood, recompute_blocks
from .loss_function import Loss, LossTokens, checked, scalars
from .losses import group_advantages, grpo, statistics_of
from .packing import Example, MicroBatch, pack, use_packed_attention
from .process_group import Gang

_T = TypeVar("_T")

LOSS_DIVISOR = 2.0**16
"""Number by which the loss of each part of a step is divided. The right divisor, such as the number of answer tokens of
the step, is known only at the last part. Then the gradients are multiplied by ``LOSS_DIVISOR`` and divided by the right
divisor. ``LOSS_DIVISOR`` is a power of two, so that the division does not round. It is close to the usual number of
tokens of a step, so that gradients have their usual size."""
_DIVERGED = "a restart would repeat it; rrl resume --set roles.trainer.learning_rate=... goes on from the last commit"


class _ExtraState(Struct, frozen=True):
    """The state of a learner besides its tensors. Random states differ between members."""

    number: int
    steps: list[float]
    """The optimizer's step counts, by parameter."""
    torch_rng: bytes
    cuda_rng: bytes
    """Random state of the GPU; empty on a CPU."""
    python_rng: tuple[int, tuple[int, ...], float | None]
    numpy_rng: tuple[bytes, int, int, float]
    reference: StoredFiles | None = None
    base: str = ""
    """Digest of the weights that the adapters change; empty without adapters."""


class _Statistics(Struct):
    """The loss and its statistics over the micro-batches of one member."""

    sums: dict[str, float] = {}
    """The loss, and the sums of which the step has the mean."""
    maxima: dict[str, float] = {}

    def add(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> None:
        """Add the statistics of other micro-batches."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)


class _OpenStep(Struct):
    """Counts of the open step, between :meth:`Learner.open` and :meth:`Learner.close`."""

    number: int
    parts: int = 0
    complete: bool = False
    """Whether the last part was added."""
    divisor: Literal["tokens", "sequences"] | float | None = None
    """The divisor that the loss named; None before its first call."""
    statistics: _Statistics = field(default_factory=_Statistics)
    """Those of this member."""
    sequences: int = 0
    """Number of trained sequences of all members; each sample of an episode counts."""
    tokens: int = 0
    """Number of trained answer tokens of all members."""
    trainable: int = 0
    """The same with those that :func:`_trainable` has left out."""
    lag: int = 0
    """Sum over the answer tokens of the number of training steps between sampling and training."""

    def divisor_value(self) -> float:
        """Return the number by which the sums of the loss are divided. Without a sequence all gradients are 0."""
        match self.divisor:
            case "tokens" | None:
                return self.tokens or 1
            case "sequences":
                return self.sequences or 1
            case constant:
                return constant

    def count(self, part: Part) -> None:
        """Add a trained part to the counts."""
        self.parts, self.complete = self.parts + 1, part.last
        self.sequences += len(part.trajectories)
        for trajectory in part.trajectories:
            versions = _unmasked(trajectory.versions, trajectory)
            self.tokens += len(versions)
            self.lag += sum(part.number - 1 - version.step for version in versions)


class Learner:
    """A model with its optimizer.

    Args:
        model: The model, on the device of ``gang`` and sharded over it.
        settings: The settings of ``[roles.trainer]``.
        steps: Length of the run, over which the learning rate decreases.
        temperature: Sampling temperature of the rollouts.
        limit: Largest number of trained tokens of a sequence (:attr:`.loss_function.LossTokens.limit`).
        gang: The members of the trainer.
        loss: The loss of the policy's steps.
        adapters: The adapters of ``model`` if only these are trained.
    """

    reference: nn.Module | None = None
    """The initial policy, frozen and sharded like the model; required if ``kl`` is above 0."""
    reference_files: StoredFiles | None = None
    """Files with the weights of ``reference``; None if there is no reference. An incarnation that restores this learner
    reads these files."""

    def __init__(
        self,
        model: nn.Module,
        settings: TrainerSettings,
        *,
        steps: int,
        temperature: float,
        limit: int = 1,
        gang: Gang | None = None,
        loss: Loss = grpo,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.number = 0
        """Last completed step; 0 before the first."""
        self._trained = trained_parameters(model)
        self._gang = gang or Gang()
        self._settings = settings
        self._steps = steps
        self._temperature = temperature
        self._limit = limit
        self._loss = loss
        if settings.activation_checkpointing:
            recompute_blocks(model)
        self._updated = self._host_parameters() if settings.offload_optimizer else self._trained
        """The parameters that the optimizer updates; with ``offload_optimizer`` copies in host memory."""
        self._optimizer = self._new_optimizer(settings.learning_rate)
        self._open: _OpenStep | None = None

    def _new_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Return an optimizer whose moments already exist and are zero.

        torch itself creates moments only at the first step. With existing moments, a saved state always has the same
        tensors.
        """
        settings, parameters = self._settings, list(self._updated.values())
        optimizer = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=shard_of(parameter).device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    def _host_parameters(self) -> dict[str, nn.Parameter]:
        """Return a parameter in host memory for each trained one, sharded like it; the values come before each step."""
        return {name: nn.Parameter(self._gang.on_host(parameter)) for name, parameter in self._trained.items()}

    def seed_rng(self, seed: int) -> None:
        """Seed every random generator from the run's seed, differently for each member.

        So a trainer that dies before its first commit starts again with the same random states.
        """
        seed = (seed + self._gang.rank) % 2**32  # the range that numpy accepts
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)

    def warm_start(
        self, batches: Iterable[Sequence[Example]], tell: Callable[[int, float], None] = lambda step, loss: None
    ) -> float:
        """Take one supervised step on the answers of each batch and return the last loss (nats).

        ``tell`` is called after each step, with its number from 1 on and its loss.

        Must be called before the first policy update. The optimizer of these steps is discarded, because moments of
        another loss would distort the policy gradient. Raises Unrepairable as :meth:`close` does.
        """
        optimizer = self._new_optimizer(self._settings.warm_start_learning_rate)
        loss = 0.0
        for step, batch in enumerate(batches, start=1):
            losses: list[float] = []
            self.model.zero_grad()
            self._backward(self._supervised_losses(batch, losses))
            loss = self._gang.sum([sum(losses)])[0]
            self._apply_gradients(optimizer, "warm start", loss)
            tell(step, loss)
        return loss

    def _supervised_losses(self, batch: Sequence[Example], losses: list[float]) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch, and append its value to ``losses``.

        The loss is the cross entropy of the micro-batch, divided by the number of the whole batch's answer tokens.
        """
        answers = sum(len(answer) for _, answer in batch)
        for micro_batch in self._micro_batches(batch, [range(len(answer)) for _, answer in batch]):
            chosen, _ = likelihood(self.model, micro_batch, 1.0)
            loss = -torch.where(micro_batch.mask, chosen, 0.0).sum() / answers
            losses.append(loss.item())
            yield loss

    def open(self, number: int) -> None:
        """Begin step ``number``, which must be the step after the last completed one.

        A step that was opened and not closed is discarded with all its parts.

        Raises:
            ValueError: ``number`` is not the next step.
            Unrepairable: ``[roles.trainer] kl`` is above 0, and the learner has no reference model.
        """
        if number != self.number + 1:
            raise ValueError(f"cannot open step {number} of the learner: the next step is {self.number + 1}")
        if self._settings.kl and self.reference is None and self.adapters is None:
            raise Unrepairable(
                "[roles.trainer] kl is above 0, but this run was started with kl = 0 and has no reference model",
                "set kl = 0, or start a new run",
            )
        self.model.zero_grad()
        self._open = _OpenStep(number)

    def add(self, part: Part) -> None:
        """Add the gradients of a part of the open step. A part contains whole groups.

        Raises:
            ValueError: Another part must come next, or no step is open.
            TaskError: The loss returned anything else than :class:`.loss_function.LossSum` describes.
        """
        step = self._open
        if step is None or step.complete or (part.number, part.index) != (step.number, step.parts):
            expected = "no part" if step is None or step.complete else f"part {step.parts} of step {step.number}"
            raise ValueError(f"cannot add part {part.index} of step {part.number} to the learner: expected {expected}")
        step.trainable += sum(len(_unmasked(each.versions, each)) for each in part.trajectories)
        part = msgspec.structs.replace(part, trajectories=_trainable(part.trajectories, self._settings.truncated))
        if part.trajectories:
            self._backward(self._policy_losses(part, step))
        step.count(part)

    def close(self) -> dict[str, float]:
        """Update the weights with the parts of the open step.

        A step whose gradient is 0, for example one without trained tokens, changes neither weights nor moments.

        Returns:
            Metrics of the whole step, which are shown to people; all of them are finite. ``staleness`` is the mean age
                of the answer tokens in training steps.

        Raises:
            ValueError: No step is open, or its last part is missing.
            Unrepairable: The loss, a gradient or a new weight is not finite; the state of this learner must not be
                committed.
        """
        step, self._open = self._open, None
        if step is None or not step.complete:
            raise ValueError("no step is open" if step is None else f"the last part of step {step.number} is missing")
        tokens, divisor = step.tokens or 1, step.divisor_value()
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(LOSS_DIVISOR / divisor)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._share_of_learning_rate(step.number)
        joined = _Statistics()
        for member in self._gang.gather(step.statistics, _Statistics):
            joined.add(member.sums, member.maxima)
        loss = joined.sums.pop("loss", 0.0) * (1 / divisor)
        norm = self._apply_gradients(self._optimizer, f"step {step.number}", loss)
        self.number = step.number
        return {
            "loss": loss,
            **{name: value * (1 / tokens) for name, value in joined.sums.items()},
            **joined.maxima,
            "grad_norm": norm,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "tokens": float(step.tokens),
            "trained_share": step.tokens / (step.trainable or 1),
            "staleness": step.lag / tokens,
        }

    def _policy_losses(self, part: Part, step: _OpenStep) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch of this member's share, and add its statistics to those of the step.

        The sum over all micro-batches, members and parts, divided by the loss's divisor and multiplied by
        ``LOSS_DIVISOR``, is the loss of the step.
        """
        settings, trajectories = self._settings, part.trajectories
        advantages = self._advantages(trajectories)
        pairs = [(trajectory.prompt, trajectory.tokens) for trajectory in trajectories]
        trained = [_unmasked(range(len(trajectory.tokens)), trajectory) for trajectory in trajectories]
        for batch in self._micro_batches(pairs, trained, part.index):
            examples = [trajectories[index] for index in batch.indices]
            old = _scatter([_unmasked(example.logprobs, example) for example in examples], batch.mask)
            advantage = (advantages[batch.indices] if examples else advantages.new_zeros(1)).to(self._gang.device)
            counts = batch.starts.diff(append=batch.starts.new_tensor([len(batch.targets)]))
            reference = None
            if settings.kl:
                with torch.no_grad(), nullcontext() if self.adapters is None else self.adapters.off():
                    reference, _ = likelihood(self.reference or self.model, batch, self._temperature)
            chosen, entropy = likelihood(self.model, batch, self._temperature)
            tokens = LossTokens(
                chosen,
                old,
                advantage.repeat_interleave(counts),
                batch.mask,
                entropy,
                reference,
                batch.starts,
                self._limit,
            )
            result = checked(self._loss(tokens, settings), step.divisor)
            step.divisor = result.divisor
            means, maxima = statistics_of(result, tokens)
            step.statistics.add(scalars({"loss": result.loss, **means}), scalars(maxima))
            yield result.loss / LOSS_DIVISOR

    def _advantages(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Return the advantage of each trajectory over its whole group, [B].

        The samples of an episode share its reward and its advantage; the reward counts once. With rewards by name, the
        samples of each agent are compared with each other only.
        """
        samples = {(each.id, each.agent): each for each in trajectories}
        numbers: dict[tuple[int, str], int] = {}
        groups = [numbers.setdefault((each.group, each.agent), len(numbers)) for each in samples.values()]
        rewards = torch.tensor([each.training for each in samples.values()], dtype=torch.float32)
        settings = self._settings
        advantages = group_advantages(
            rewards, torch.tensor(groups), settings.advantage_floor, by_std=settings.advantage_std
        )
        places = {key: place for place, key in enumerate(samples)}
        return advantages[[places[each.id, each.agent] for each in trajectories]]

    def _micro_batches(
        self, pairs: Sequence[Example], trained: Sequence[Sequence[int]], first: int = 0
    ) -> Iterator[MicroBatch]:
        """Yield this member's examples, at most ``micro_batch_tokens`` tokens at a time.

        All members yield the same number of micro-batches. A model that cannot attend within sequences gets each
        example alone.

        Args:
            pairs: The examples of all members.
            trained: The trained positions in the answer of each example.
            first: As in :func:`.partition.partition`.
        """
        sizes = [len(prompt) + len(answer) for prompt, answer in pairs]
        shares = partition(sizes, self._gang.world, first)
        most = self._settings.micro_batch_tokens or sum(sizes)
        if not use_packed_attention(self.model):
            most = 1
        for places in micro_batches(sizes, shares, self._gang.rank, most):
            indices = sorted((shares[self._gang.rank][place] for place in places), key=sizes.__getitem__)
            examples, places_trained = [pairs[index] for index in indices], [trained[index] for index in indices]
            yield pack(examples, places_trained, indices, self._gang.device)

    def _share_of_learning_rate(self, number: int) -> float:
        """Return the factor of the learning rate: below 1 in the steps of the warm-up, 1 after them, then falling.

        The factor depends on the step only, so there is no scheduler state to save.
        """
        settings = self._settings
        if number <= settings.warmup:
            return number / (settings.warmup + 1)
        done = (number - 1 - settings.warmup) / max(1, self._steps - settings.warmup)
        floor = settings.final_learning_rate
        match settings.schedule:
            case "constant":
                return 1.0
            case "linear":
                return max(floor, 1 - done)
            case "cosine":
                return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    def _backward(self, losses: Iterable[Tensor]) -> None:
        """Add the gradients of this member's micro-batches to the gradients that the parameters already have.

        ``losses`` yields the losses of the micro-batches; each loss is created after the previous loss was processed.
        FSDP averages the gradients over the members, and adds up the gradients of one member's micro-batches in float32
        shards.
        """
        for loss in losses:
            (loss * self._gang.world).backward()  # type: ignore[no-untyped-call]

    def _apply_gradients(self, optimizer: torch.optim.Optimizer, name: str, loss: float) -> float:
        """Clip the gradients, take one optimizer step if they are not all 0, and return their norm before it.

        Args:
            optimizer: The optimizer.
            name: Name of the step, for an error.
            loss: Loss of the step, for an error.

        Raises:
            Unrepairable: The gradient or a new weight is not finite; raised in all members.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._settings.gradient_clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        rate = optimizer.param_groups[0]["lr"]
        observed = f"{name}: loss {loss:.4g}, gradient norm {norm:.4g}, learning rate {rate:.4g}"
        if not norm.isfinite():
            raise Unrepairable(f"the gradient is not finite in {observed}", _DIVERGED)
        if norm > 0:  # else moments and weight decay would move the weights
            self._step(optimizer)
            self.check_weights(observed, _DIVERGED)
        return float(norm)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take one optimizer step, with ``offload_optimizer`` in host memory."""
        if self._updated is self._trained:
            optimizer.step()
            return
        for name, host in self._updated.items():
            shard_of(host).copy_(shard_of(self._trained[name]))
            if (gradient := self._trained[name].grad) is not None:
                host.grad = self._gang.on_host(gradient)
        optimizer.step()
        for name, host in self._updated.items():
            shard_of(self._trained[name]).copy_(shard_of(host))
            host.grad = None

    def discard_gradients(self) -> None:
        """Free the gradients of the last step, between two steps; :meth:`open` does it otherwise."""
        self.model.zero_grad()

    @torch.no_grad()
    def check_weights(
        self, after: str = "loading", why: str = "the model folder or the checkpoint contains it"
    ) -> None:
        """Raise Unrepairable in all members, with the reason ``why``, if a weight of any member is not finite."""
        sums = torch.stack([shard_of(each).sum(dtype=torch.float32) for each in self.model.parameters()])
        if not self._gang.all(bool(sums.isfinite().all())):
            raise Unrepairable(f"a weight is not finite after {after}", why)

    def weights(self) -> dict[str, Tensor]:
        """Return the model's live tensors by name, sharded if the model is sharded, and without its adapters."""
        return weights(self.model)

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint has of the model, by name: all, or those of the adapters."""
        if self.adapters is None:
            return self.weights()
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors of the model and of the optimizer's moments by name, sharded if the model is sharded.

        To save a state, copy the tensors before the next step. To restore a state, copy it into the tensors and call
        :meth:`resume`.
        """
        moments = {
            f"{kind}.{name}": self._optimizer.state[parameter][kind]
            for kind in ("exp_avg", "exp_avg_sq")
            for name, parameter in self._updated.items()
        }
        return {f"{WEIGHTS_PREFIX}{name}": tensor for name, tensor in self.saved_weights().items()} | moments

    def extra_state(self) -> bytes:
        """Return the state of this member, besides :meth:`tensors`, that the next step depends on."""
        numpy_state = numpy.random.get_state(legacy=False)
        generator = numpy_state["state"]
        numpy_rng = (generator["key"].tobytes(), int(generator["pos"]), numpy_state["has_gauss"], numpy_state["gauss"])
        on_gpu = self._gang.device.type == "cuda"
        version, words, gauss = random.getstate()
        state = _ExtraState(
            number=self.number,
            steps=torch.stack(
                [self._optimizer.state[parameter]["step"] for parameter in self._updated.values()]
            ).tolist(),
            torch_rng=torch.get_rng_state().numpy().tobytes(),
            cuda_rng=torch.cuda.get_rng_state(self._gang.device).numpy().tobytes() if on_gpu else b"",
            python_rng=(version, words, gauss),
            numpy_rng=numpy_rng,
            reference=self.reference_files,
            base=self.adapters.base if self.adapters is not None else "",
        )
        return msgspec.msgpack.encode(state)

    def resume(self, extra_state: bytes, *, random_states: bool = True) -> None:
        """Restore the state that :meth:`extra_state` returned.

        Args:
            extra_state: The saved state.
            random_states: False to keep the current random states, if the saved states are from another member.

        Raises:
            ValueError: The state is of another model.
            Unrepairable: The state is of adapters of another base.
        """
        state = msgspec.msgpack.decode(extra_state, type=_ExtraState)
        if self.adapters is not None and state.base != self.adapters.base:
            raise Unrepairable(
                "[model] path: its files of weights have changed since this run began, and the adapters fit only the"
                " old ones",
                "put the old files back, and resume the run",
            )
        for parameter, step in zip(self._updated.values(), state.steps, strict=True):
            self._optimizer.state[parameter]["step"].fill_(step)
        self.number = state.number
        self._open = None
        self.reference_files = state.reference
        if not random_states:
            return
        torch.set_rng_state(_as_tensor(state.torch_rng))
        if state.cuda_rng and self._gang.device.type == "cuda":
            torch.cuda.set_rng_state(_as_tensor(state.cuda_rng), self._gang.device)
        random.setstate(state.python_rng)
        key, pos, has_gauss, gauss = state.numpy_rng
        numpy.random.set_state(("MT19937", numpy.frombuffer(key, dtype=numpy.uint32), pos, has_gauss, gauss))


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _trainable(trajectories: Sequence[Trajectory], truncated: str) -> Sequence[Trajectory]:
    """Return the trajectories of a part as ``[roles.trainer] truncated`` says.

    With ``mask``, no token of a truncated trajectory is trained. With ``drop``, it is left out, and so is a group with
    fewer than two others (of the same agent). An episode whose samples are not all truncated goes on with the others.
    """
    if truncated == "train" or not any(each.truncated for each in trajectories):
        return trajectories
    if truncated == "mask":
        return tuple(
            msgspec.structs.replace(each, masked=((0, len(each.tokens)),)) if each.truncated else each
            for each in trajectories
        )
    left = {(each.id, each.agent): each.group for each in trajectories if not each.truncated}
    counts = Counter((group, agent) for (_, agent), group in left.items())
    return tuple(each for each in trajectories if not each.truncated and counts[each.group, each.agent] > 1)


def _unmasked(values: Sequence[_T], trajectory: Trajectory) -> Sequence[_T]:
    """Return the ``values`` of trained tokens; ``values`` has one value per token of a trajectory."""
    if not trajectory.masked:
        return values
    trained = [True] * len(values)
    for start, count in trajectory.masked:
        trained[start : start + count] = [False] * count
    return list(compress(values, trained))


def _scatter(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Put one value per trained token where the mask is set, row by row, and zeros elsewhere: [M] float."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=mask.device)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, flat)
