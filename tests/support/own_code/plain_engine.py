"""An engine of a user, without a cache: each token of an answer is a forward pass over the answer's whole context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import rrl
from rrl.roles.models.policy import load_weights, materialise
from rrl.roles.models.tokenizer import Tokenizer
from rrl.roles.rollout.engine import StepOutput


class PlainEngine:
    def __init__(self, me: rrl.Worker, model: nn.Module, tokenizer: Tokenizer) -> None:
        materialise(model, torch.device("cpu"))
        self._model, self._stop_tokens, self._lease = model.eval(), tokenizer.stop_tokens, me.rollout.lease
        self._items: list[rrl.Item] = []
        self._version, self._extras = rrl.Version(0, 0), me.job.sampling.extras
        Path("engine.txt").write_text(str(me.launch.incarnation))

    @property
    def free_slots(self) -> int:
        return self._lease - len(self._items)

    @property
    def has_work(self) -> bool:
        return bool(self._items)

    def add(self, items: Sequence[rrl.Item]) -> None:
        self._items += items

    def step(self) -> StepOutput:
        items, self._items = self._items, []
        segments = [segment for segment in map(self._complete, items) if segment is not None]
        return segments, [item.trajectory for item in items]

    def _complete(self, item: rrl.Item) -> rrl.Segment | None:
        before = [token for segment in item.so_far for token in segment.tokens]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < item.max_new and not self._stop_tokens & {*before[-1:], *tokens[-1:]}:
            with torch.no_grad():
                logits = self._model(input_ids=torch.tensor([[*item.prompt, *before, *tokens]])).logits
            distribution = logits[0, -1].log_softmax(-1)
            tokens.append(int(torch.multinomial(distribution.exp(), 1)))
            logprobs.append(float(distribution[tokens[-1]]))
        if not tokens:
            return None
        extras = {name: bytes(len(tokens) * (extra.per_token or 0)) for name, extra in self._extras.items()}
        return rrl.Segment(item.trajectory, len(before), tuple(tokens), tuple(logprobs), self._version, extras=extras)

    def flush(self) -> StepOutput:
        return [], []

    def abort(self, trajectories: Iterable[int]) -> None:
        gone = set(trajectories)
        self._items = [item for item in self._items if item.trajectory not in gone]

    def load(self, version: rrl.Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        load_weights(self._model, tensors)
        self._version = version

    def probe(self) -> None:
        self._model(input_ids=torch.tensor([[0]]))

    def close(self) -> None:
        pass
