"""The learner: a model, its optimizer, and one GRPO step over a batch of trajectories. It knows no run.

Where it is spread over a gang each member learns from its share of the batch, and all make the same step as one process
would with the whole. Everything that the next step depends on is in :meth:`Learner.tensors` and :meth:`Learner.rest`;
restored from them, a learner goes on bit for bit as if nothing had happened (docs/sources.md, torch: leaving one piece
out breaks that at once).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..models.policy import weights
from ..trajectories.types import Batch, Trajectory
from ..worker.checkpoint_files import StoredFiles
from .losses import group_advantages, grpo_loss, likelihood
from .process_group import Gang

Example = tuple[Sequence[int], Sequence[int]]
"""Prompt and answer as tokens, for the supervised warm start."""

_BETAS = (0.9, 0.95)


class LearnerSettings(Struct, frozen=True):
    """Numbers of ``[roles.trainer]`` (defaults and reasons: :class:`rrl.config.job.roles.TrainerRole`)."""

    learning_rate: float
    final_learning_rate: float
    clip: float
    entropy: float
    advantage_floor: float
    gradient_clip: float
    warm_start_steps: int
    warm_start_batch: int
    warm_start_learning_rate: float
    kl: float = 0.0
    micro_batch: int | None = None


class _ExtraState(Struct, frozen=True):
    """What is no tensor of the model's shape. Random states are a member's own."""

    number: int
    steps: list[float]
    """of the optimizer, by parameter"""
    torch_rng: bytes
    cuda_rng: bytes
    """empty on a CPU"""
    python_rng: tuple[int, tuple[int, ...], float | None]
    numpy_rng: tuple[bytes, int, int, float]
    reference: StoredFiles | None = None


class _MicroBatch(Struct, frozen=True):
    """Some examples as one rectangle: tokens [B, L], the mask of answer tokens [B, T] with T = L - ``first``, where
    each of them stands among the member's own, and whether they count."""

    tokens: Tensor
    mask: Tensor
    first: int
    places: Sequence[int]
    counts: bool


class Learner:
    """``steps`` is the length of the run, over which the learning rate falls; ``temperature`` is the rollouts'.

    ``model`` is already where ``gang`` wants it, and sharded over it."""

    reference: nn.Module | None = None
    """The initial policy, frozen, sharded as the model is: needed where ``kl`` is above 0"""
    reference_files: StoredFiles | None = None
    """where its weights are, for whoever goes on from this learner's state"""

    def __init__(
        self, model: nn.Module, settings: LearnerSettings, *, steps: int, temperature: float, gang: Gang | None = None
    ) -> None:
        self.model = model
        self.number = 0
        """the last step done; 0 before the first"""
        self._gang = gang or Gang()
        self._settings = settings
        self._steps = steps
        self._temperature = temperature
        self._optimizer = self._fresh_optimizer(settings.learning_rate)

    def _fresh_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """With its moments, which torch would make at the first step: what is saved always has the same shape."""
        parameters = self.model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)
        for each in self.model.parameters():
            optimizer.state[each] = {
                "step": torch.zeros((), device=self._gang.device),
                "exp_avg": torch.zeros_like(each),
                "exp_avg_sq": torch.zeros_like(each),
            }
        return optimizer

    def seed_rng(self, seed: int) -> None:
        """A fresh one: every source of chance begins from the run's seed, for each member at another place, so that who
        dies before its first commit begins as it did."""
        seed = (seed + self._gang.rank) % 2**32  # numpy takes no other
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)

    def warm_start(self, batches: Iterable[Sequence[Example]]) -> float:
        """One supervised step on the answers of each batch, before the first policy update; the last loss (nats).

        Its optimizer is thrown away: moments of another loss would only mislead the policy gradient.
        """
        optimizer = self._fresh_optimizer(self._settings.warm_start_learning_rate)
        loss = 0.0
        for batch in batches:
            losses: list[float] = []
            self._update(optimizer, self._supervised_losses(batch, losses))
            loss = self._gang.sum([sum(losses)])[0]
        return loss

    def _supervised_losses(self, batch: Sequence[Example], losses: list[float]) -> Iterator[Tensor]:
        """As :meth:`_policy_losses`: cross entropy, mean over the batch's answer tokens."""
        answers = sum(len(answer) for _, answer in batch)
        for part in self._micro_batches(batch):
            chosen, _ = self._likelihood(self.model, part, 1.0)
            loss = -torch.where(part.mask, chosen, 0.0).sum() / answers
            losses.append(loss.item())
            yield loss

    def step(self, batch: Batch) -> dict[str, float]:
        """Learn from the batch of step ``number + 1``; metrics for people, all finite.

        Raises ValueError for any other step's batch, RuntimeError when a gradient is not finite (then nothing of this
        learner may be committed).
        """
        if batch.number != self.number + 1:
            raise ValueError(f"batch {batch.number} is not the one after step {self.number}")
        if self._settings.kl and self.reference is None:
            raise RuntimeError("kl is above 0, and there is no reference: a run that began without one has none")
        statistics: list[dict[str, float]] = []
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._share_of_learning_rate(batch.number)
        self._update(self._optimizer, self._policy_losses(batch, statistics))
        self.number = batch.number
        parts = {name: sum(each[name] for each in statistics) for name in statistics[0]}
        return {**dict(zip(parts, self._gang.sum(list(parts.values())), strict=True)), **_describe(batch)}

    def _policy_losses(self, batch: Batch, statistics: list[dict[str, float]]) -> Iterator[Tensor]:
        """One for each part of this member's share; what there is to be told of each goes into ``told``. Their sum over
        parts and members is the loss of the batch."""
        settings, trajectories = self._settings, batch.trajectories
        rewards = torch.tensor([each.training for each in trajectories], dtype=torch.float32)
        groups = torch.tensor([each.group for each in trajectories])
        advantages = group_advantages(rewards, groups, settings.advantage_floor)  # of whole groups
        mine = range(len(trajectories))[self._gang.rank :: self._gang.world] or range(1)
        answers = float(sum(len(each.tokens) for each in trajectories))
        for part in self._micro_batches([(each.prompt, each.tokens) for each in trajectories]):
            these = [mine[place] for place in part.places]
            old = _place([trajectories[i].logprobs for i in these] if part.counts else [], part.mask)
            gain = advantages[these].to(self._gang.device)
            reference = None
            if settings.kl and self.reference is not None:
                with torch.no_grad():
                    reference, _ = self._likelihood(self.reference, part, self._temperature)
            chosen, entropy = self._likelihood(self.model, part, self._temperature)
            loss, stats = grpo_loss(
                chosen, old, gain, part.mask, settings.clip, entropy, settings.entropy, answers, reference, settings.kl
            )
            statistics.append({"loss": loss.item(), **stats})
            yield loss

    def _micro_batches(self, pairs: Sequence[Example]) -> Iterator[_MicroBatch]:
        """This member's examples, so many at a time as ``micro_batch`` says. All members have as many parts: who has no
        more examples takes part with one that does not count."""
        rank, world = self._gang.rank, self._gang.world
        mine, most = pairs[rank::world], len(pairs[::world])
        size = self._settings.micro_batch or most
        for start in range(0, most, size):
            places = range(len(mine))[start : start + size]
            tokens, mask, first = _pad([mine[place] for place in places] or pairs[:1])
            mask = mask & bool(places)
            tokens, mask = tokens.to(self._gang.device), mask.to(self._gang.device)
            yield _MicroBatch(tokens, mask, first, places or range(1), bool(places))

    def _likelihood(self, model: nn.Module, part: _MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        logits = _logits(model, part.tokens, part.first)
        return likelihood(logits, part.tokens[:, part.first :], temperature)

    def _share_of_learning_rate(self, number: int) -> float:
        """Falls linearly from 1 at step 1. A function of the step alone: there is no scheduler whose state to save."""
        return max(self._settings.final_learning_rate, 1 - (number - 1) / self._steps)

    def _update(self, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor]) -> None:
        """``losses``: the parts of this member's part of the sum, each made when the one before it is done with. FSDP
        takes the mean of the members' gradients, and adds up those of one member's parts, sharded, in float32."""
        optimizer.zero_grad()
        for loss in losses:
            (loss * self._gang.world).backward()  # type: ignore[no-untyped-call]
        limit = self._settings.gradient_clip
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, error_if_nonfinite=True)
        optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, live, and sharded if it is."""
        return weights(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's weights and the optimizer's moments by name: the live tensors, sharded if the model is.

        To keep a state, copy them before the next step. To restore one, copy into them and call :meth:`resume`."""
        moments = {
            f"{kind}.{name}": self._optimizer.state[parameter][kind]
            for kind in ("exp_avg", "exp_avg_sq")
            for name, parameter in self.model.named_parameters()
        }
        return {f"model.{name}": tensor for name, tensor in self.weights().items()} | moments

    def extra_state(self) -> bytes:
        """What else the next step depends on, of this member."""
        state = numpy.random.get_state(legacy=False)
        numpy_rng = (state["state"]["key"].tobytes(), int(state["state"]["pos"]), state["has_gauss"], state["gauss"])
        on_gpu = self._gang.device.type == "cuda"
        version, words, gauss = random.getstate()
        rest = _ExtraState(
            number=self.number,
            steps=torch.stack([self._optimizer.state[each]["step"] for each in self.model.parameters()]).tolist(),
            torch_rng=torch.get_rng_state().numpy().tobytes(),
            cuda_rng=torch.cuda.get_rng_state(self._gang.device).numpy().tobytes() if on_gpu else b"",
            python_rng=(version, words, gauss),
            numpy_rng=numpy_rng,
            reference=self.reference_files,
        )
        return msgspec.msgpack.encode(rest)

    def resume(self, extra_state: bytes, *, random_states: bool = True) -> None:
        """Take over what :meth:`rest` told; without ``chance`` all but the random states, which were another member's.
        Raises ValueError when it is of another model."""
        state = msgspec.msgpack.decode(extra_state, type=_ExtraState)
        for parameter, step in zip(self.model.parameters(), state.steps, strict=True):
            self._optimizer.state[parameter]["step"].fill_(step)
        self.number = state.number
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


def _pad(pairs: Sequence[Example]) -> tuple[Tensor, Tensor, int]:
    """Prompts with their answers as one rectangle, padded on the right.

    Returns tokens [B, L], the mask of answer tokens [B, L - first], and ``first``, the length of the shortest prompt:
    nothing before it needs logits. Padding holds token 0; attention is causal, so nothing real ever sees it.
    """
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    tokens = pad_sequence(rows, batch_first=True)
    start = torch.tensor([len(prompt) for prompt, _ in pairs])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    first = int(start.min())
    position = torch.arange(first, tokens.shape[1])[None, :]
    return tokens, (position >= start) & (position < end), first


def _place(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Values per answer token, put where the mask says; row by row, zeros elsewhere. [B, T] float."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=mask.device)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, flat)


def _logits(model: nn.Module, tokens: Tensor, first: int) -> Tensor:
    """Logits of the tokens from ``first`` on, each from what stands before it: [B, L - first, vocabulary]."""
    wanted = tokens.shape[1] - first
    kept = max(1, wanted)  # 0 are all; an answer without tokens that is alone wants none
    logits: Tensor = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=kept).logits
    surplus = logits.shape[1] - wanted  # not every model knows the word
    return logits[:, surplus:].contiguous() if surplus else logits


def _describe(batch: Batch) -> dict[str, float]:
    """What the batch itself tells. ``staleness``: weight versions between sampling and training, mean over tokens."""
    trajectories: Sequence[Trajectory] = batch.trajectories
    lags = [batch.number - 1 - version.step for each in trajectories for version in each.versions]
    return {
        "reward": sum(each.reward for each in trajectories) / len(trajectories),
        "training_reward": sum(each.training for each in trajectories) / len(trajectories),
        "tokens": float(len(lags)),
        "staleness": sum(lags) / len(lags),
    }
