"""Turns with a constraint in a real vLLM engine on CPU: what it masks, and what it records, compared with torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rrl.core.run_spec import ModelSpec
from rrl.core.types import Version
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.roles.models.policy import load_initial, materialise, skeleton
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.foreign_sampling import Masks
from rrl.roles.trajectories.types import Item, Segment
from rrl.roles.trajectories.types import Sampling as Overrides
from rrl.tests.support.engine import engines
from rrl.tests.support.engine.engines import ATOL, Made
from rrl.tests.support.roles import folders

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.7
_SCHEMA = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["mm", "cm"]}},
    "required": ["digit", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_GRAMMAR = f"start: %json {json.dumps(_SCHEMA)}"
_MASKED = Overrides(constraint=_GRAMMAR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.qwen3(tmp_path_factory.mktemp("model") / "folder", head_dim=32)


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    spec = ModelSpec(path=str(folder), max_length=128)
    made = skeleton(spec, folders.VOCABULARY)
    materialise(made, torch.device("cpu"))
    load_initial(made, spec)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path, model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sampling = Sampling(temperature=TEMPERATURE, segment_tokens=8)
    spec = ModelSpec(path=str(folder), max_length=128)
    engine = engines.vllm_engine(spec, tmp_path_factory.mktemp("config"), sampling, stop_token=folders.END, masks=True)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine, model: nn.Module) -> Engine:
    engines.load(shared, 0, model)
    return shared


def _made(engine: Engine, items: list[Item]) -> Made:
    made = Made()
    engine.add(items)
    made.to_the_end(engine)
    assert sorted(made.finished) == [item.trajectory for item in items]
    return made


def _item(number: int, sampling: Overrides | None = _MASKED, so_far: tuple[Segment, ...] = ()) -> Item:
    return Item(number, 0, tuple(range(5, 9 + number)), so_far, 60, sampling)


def test_masked_answers_conform_with_logprobs_of_the_masked_distribution(
    engine: Engine, model: nn.Module, folder: Path
) -> None:
    tokenizer = FolderTokenizer(folder, chat=True)
    made = _made(engine, [*map(_item, range(6)), _item(6, None)])
    assert made.worst([_item(6, None)], {0: model}, TEMPERATURE)[0] < ATOL
    for number in range(6):
        tokens, prompt = made.tokens(number), _item(number).prompt
        answer = json.loads(tokenizer.decode(tokens))
        assert answer["unit"] in ("mm", "cm")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        given = [value for segment in made.segments[number] for value in segment.logprobs]
        for place, token in enumerate(tokens):
            mask = Masks(tokenizer).begin(_GRAMMAR, tokens[:place])
            assert mask is not None
            masked = logits[place].masked_fill(~mask.allowed(logits.shape[-1], logits.device), -torch.inf)
            assert (masked / TEMPERATURE).log_softmax(-1)[token].item() == pytest.approx(given[place], abs=ATOL)


def test_an_answer_goes_on_in_its_grammar_after_new_weights_and_in_another_rollout(
    engine: Engine, model: nn.Module, folder: Path
) -> None:
    tokenizer, made = FolderTokenizer(folder, chat=True), Made()
    begun = tokenizer.encode('{"digit":4,"un')
    so_far = (Segment(1, 0, begun, (0.0,) * len(begun), Version(0, 1)),)
    made.segments[1] = [*so_far]
    engine.add([_item(0), _item(1, so_far=so_far)])
    made.steps(engine, 4)
    engines.load(engine, 1, model)
    made.to_the_end(engine)
    assert json.loads(tokenizer.decode(made.tokens(0)))["unit"] in ("mm", "cm")
    assert json.loads(tokenizer.decode(made.tokens(1)))["digit"] == 4


@pytest.mark.parametrize("grammar", ["start: %json {", 'start: %json {"not": {}}', "nonsense"])
def test_a_grammar_that_cannot_be_compiled_ends_its_turn_only(engine: Engine, folder: Path, grammar: str) -> None:
    made = _made(engine, [_item(0), _item(1, Overrides(constraint=grammar))])
    assert 1 not in made.segments
    json.loads(FolderTokenizer(folder, chat=True).decode(made.tokens(0)))
