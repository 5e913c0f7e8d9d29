"""Measures what constraints do to answers: a real endpoint and store, and the torch engine with random tiny weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import torch
from msgspec import Struct
from torch import nn

from rrl.core.run_spec import ModelSpec
from rrl.core.types import Version
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.roles.models.policy import build_model
from rrl.roles.rollout import engine as engines
from rrl.roles.rollout.foreign_sampling import Masks
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done, Item, Segment
from rrl.tests.support.roles.endpoint import tool_folders
from rrl.tests.support.roles.endpoint.store_turns import StoreInProcess
from rrl.tests.support.roles.trajectories.agents import AGENTS, episodes, finish, open_agents_store
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, ROLLOUT, bind, lease

TEMPERATURE = 0.9
MAX_NEW = 800
"""Maximum number of tokens (bytes) of an answer; random weights write as much white space as a grammar allows."""
_TIMEOUT_S = 600.0
_SECRET = bytes(32)


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_SHORT = {"type": "string", "maxLength": 12}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_SCHEMAS: Sequence[dict[str, Any]] = (
    _object(length=_DIGIT, unit={"enum": ["mm", "cm"]}),
    _object(names={"type": "array", "items": _SHORT, "minItems": 1, "maxItems": 3}, done={"type": "boolean"}),
    _object(value={"anyOf": [_SHORT, _DIGIT, {"type": "null"}]}, note={"const": 'say "ü"\n'}),
    _object(date={"type": "string", "format": "date"}, code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    {"$ref": "#/$defs/list", "$defs": {"list": _object(v=_DIGIT, next={"anyOf": [{"type": "null"}, {"const": []}]})}},
)
_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in (("measure", _SCHEMAS[0]), ("list_names", _SCHEMAS[1]))
]


def _calls() -> Iterator[dict[str, Any]]:
    """Yield the constraints of the calls of an episode."""
    for schema in _SCHEMAS:
        yield {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    yield {"tools": _TOOLS, "tool_choice": "required"}
    yield {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "list_names"}}}
    yield {"tools": _TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMAS[0]}}}


class _Played(Struct):
    """What was sampled, in the engine's own order."""

    items: dict[int, Item]
    segments: list[Segment]

    def tokens(self, *, masked: bool) -> int:
        """Return the number of tokens that were sampled with, or without, a mask."""
        return sum(len(each.tokens) for each in self.segments if self._is_masked(each) == masked)

    def _is_masked(self, segment: Segment) -> bool:
        sampling = self.items[segment.trajectory].sampling
        return sampling is not None and sampling.constraint is not None


def measure(folder: Path) -> dict[str, float]:
    """Return the figures of constraints; ``folder`` is new.

    - ``constrained_trained``: share of the tokens of constrained answers that are trained under ``ask``.
    - ``masked_trained``: number of trained tokens that were sampled with a mask, under ``enforce``.
    - ``invalid_enforced``: share of the answers under ``enforce`` that do not conform.
    - ``max_logprob_error``: largest difference (nats) of a recorded log-probability, masked or not, from torch's.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    chat = open_chat(ModelSpec(str(tool_folders.make(folder / "model")), chat=True))
    shape = ModelSpec(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=2, max_length=8192)
    model = build_model(shape, chat.tokenizer.size, 0)
    asked, _, trained = _play(folder / "ask", chat, model, "ask")
    enforced, valid, with_mask = _play(folder / "enforce", chat, model, "enforce")
    return {
        "constrained_trained": trained / asked.tokens(masked=False),
        "masked_trained": with_mask - enforced.tokens(masked=False),
        "enforced_answers": len(valid),
        "invalid_enforced": valid.count(False) / len(valid),
        "max_logprob_error": max(_worst(played, chat, model) for played in (asked, enforced)),
    }


def _play(folder: Path, chat: ModelChat, model: nn.Module, constraints: str) -> tuple[_Played, list[bool], int]:
    """Play a step's episodes. Returns what was sampled, whether each answer conforms, and the trained tokens."""
    store = open_agents_store(folder, max_new_tokens=MAX_NEW)
    turns = StoreInProcess(store, AGENTS)
    policy = Policy(TEMPERATURE, constraints=constraints)
    server = EndpointServer(Endpoint(ServedRun("run", _SECRET, policy, MAX_NEW, 8192), chat, turns).application)
    server.start()
    played, ended, valid = _Played({}, []), threading.Event(), list[bool]()
    rollout = threading.Thread(target=_generate, args=(store, turns, chat, model, played, ended))
    rollout.start()
    try:
        for number, item in enumerate(episodes(store, GROUP * BATCH)):
            key = encode_key(EpisodeKey("run", item.episode, item.attempt), _SECRET)
            client = openai.OpenAI(base_url=server.base_url, api_key=key, timeout=_TIMEOUT_S, max_retries=0)
            question: list[Any] = [{"role": "user", "content": f"question {number}"}]
            limit = 40 if constraints == "ask" else MAX_NEW
            for call in _calls():
                answer = client.chat.completions.create(model="policy", messages=question, max_tokens=limit, **call)
                valid.append(_conforms(answer.choices[0].message, call))
            if constraints == "enforce":  # an episode needs an answer to train
                client.chat.completions.create(model="policy", messages=question, max_tokens=40)
            with turns.lock:
                finish(store, item, float(number))
        with turns.lock:
            batch = bind(store, 1)
    finally:
        ended.set()
        rollout.join()
        server.stop()
        store.close()
    trained = sum(len(each.tokens) - sum(count for _, count in each.masked) for each in batch.trajectories)
    return played, valid, trained


def _generate(
    store: Store, turns: StoreInProcess, chat: ModelChat, model: nn.Module, played: _Played, ended: threading.Event
) -> None:
    """Sample all turns of a store."""
    tokenizer, settings = chat.tokenizer, engines.Sampling(TEMPERATURE, segment_tokens=64)
    engine = TorchEngine(
        model, stop_tokens=tokenizer.stop_tokens, seed=0, sampling=settings, lease=1, masks=_masks(chat)
    )
    engine.load(Version(0, 1), ((name, each.clone()) for name, each in model.state_dict().items()))
    while not ended.wait(0.002):
        with turns.lock:
            items = lease(store, at_most=engine.free_slots)
        played.items |= {item.trajectory: item for item in items}
        engine.add(items)
        while engine.has_work:
            segments, finished = engine.step()
            played.segments += segments
            with turns.lock:
                grown = store.append(ROLLOUT, segments, finished)
                store.flush()
            assert isinstance(grown, Done), grown


def _masks(chat: ModelChat) -> Masks:
    assert isinstance(chat.tokenizer, FolderTokenizer)
    return Masks(chat.tokenizer)


def _conforms(message: Any, call: dict[str, Any]) -> bool:
    """Return whether an answer is what its call demands."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in call.get("tools", ())}
    try:
        for made in message.tool_calls or ():
            jsonschema.validate(json.loads(made.function.arguments), schemas[made.function.name])
        if message.tool_calls:
            choice = call.get("tool_choice", "auto")
            return isinstance(choice, str) or choice["function"]["name"] == message.tool_calls[0].function.name
        jsonschema.validate(json.loads(message.content), call["response_format"]["json_schema"]["schema"])
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False
    return True


@torch.no_grad()
def _worst(played: _Played, chat: ModelChat, model: nn.Module) -> float:
    """Return the largest difference (nats) of a recorded log-probability from torch's."""
    worst = 0.0
    for number, item in played.items.items():
        own = [segment for segment in played.segments if segment.trajectory == number]
        tokens = [token for segment in own for token in segment.tokens]
        logprobs = [value for segment in own for value in segment.logprobs]
        whole = torch.tensor([[*item.prompt, *tokens]])
        logits = model(input_ids=whole, use_cache=False).logits[0, len(item.prompt) - 1 : -1].double()
        constraint = None if item.sampling is None else item.sampling.constraint
        mask = None if constraint is None else _masks(chat).begin(constraint, ())
        for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
            if mask is not None:
                row = row.masked_fill(~mask.allowed(len(row), row.device), -torch.inf)
                mask.take(token)
            worst = max(worst, abs(float((row / TEMPERATURE).log_softmax(-1)[token]) - logprob))
    return worst


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made))))
