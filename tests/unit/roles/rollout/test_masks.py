from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rrl.core.types import Version
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.roles.models.policy import build_model
from rrl.roles.rollout.engine import Sampling
from rrl.roles.rollout.foreign_sampling import Masks
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trajectories.types import Item, Segment
from rrl.roles.trajectories.types import Sampling as Overrides
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer import harness

pytest.importorskip("llguidance")
pytestmark = pytest.mark.torch

_SCHEMA = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["mm", "cm"]}},
    "required": ["digit", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_GRAMMAR = f"start: %json {json.dumps(_SCHEMA)}"
_FIRST = Version(0, 1)


@pytest.fixture
def tokenizer(tmp_path: Path) -> FolderTokenizer:
    folders.tokenizer(tmp_path)
    return FolderTokenizer(tmp_path, chat=True)


def _engine(tokenizer: FolderTokenizer) -> TorchEngine:
    model = build_model(harness.SMALL, tokenizer.size + 3, 1)  # a vocabulary may be padded
    engine = TorchEngine(
        model,
        stop_tokens=tokenizer.stop_tokens,
        seed=0,
        sampling=Sampling(temperature=0.7, segment_tokens=4),
        masks=Masks(tokenizer),
    )
    engine.load(_FIRST, model.state_dict().items())
    return engine


def _items(count: int, **changes: Any) -> list[Item]:
    how = Overrides(constraint=_GRAMMAR, **changes)
    return [Item(n, n, tuple(range(2, 4 + n)), (), 50, how) for n in range(count)]


def _tokens(segments: list[Segment]) -> tuple[int, ...]:
    return tuple(token for each in segments for token in each.tokens)


def test_masked_answers_conform_beside_answers_that_do_not(tokenizer: FolderTokenizer) -> None:
    free = Item(100, 100, (5, 6), (), 50)
    made = harness.roll_out(_engine(tokenizer), [*_items(8), free])
    answers = [json.loads(tokenizer.decode(_tokens(made[n]))) for n in range(8)]
    assert all(answer["unit"] in ("mm", "cm") and 0 <= answer["digit"] <= 9 for answer in answers)
    assert len({str(answer) for answer in answers}) > 1
    assert _tokens(made[100])[0] != tokenizer.encode("{")[0]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"repetition_penalty": 1.3}])
def test_masked_answers_end_by_themselves_with_any_other_sampling(
    tokenizer: FolderTokenizer, changes: dict[str, float]
) -> None:
    for segments in harness.roll_out(_engine(tokenizer), _items(4, **changes)).values():
        assert _tokens(segments)[-1] in tokenizer.stop_tokens
        json.loads(tokenizer.decode(_tokens(segments)))


def test_logprobs_are_those_of_the_masked_distribution(tokenizer: FolderTokenizer) -> None:
    model, worst = build_model(harness.SMALL, tokenizer.size + 3, 1), 0.0
    items = _items(4)
    for item in items:
        segments = harness.roll_out(_engine(tokenizer), [item])[item.trajectory]
        tokens, given = _tokens(segments), [value for each in segments for value in each.logprobs]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*item.prompt, *tokens]])).logits[0, len(item.prompt) - 1 : -1]
        for place, token in enumerate(tokens):
            mask = Masks(tokenizer).begin(_GRAMMAR, tokens[:place])
            assert mask is not None
            allowed = mask.allowed(logits.shape[-1], logits.device)
            masked = logits[place].masked_fill(~allowed, -torch.inf)
            worst = max(worst, abs((masked / 0.7).log_softmax(-1)[token].item() - given[place]))
    assert worst < 1e-3


def test_an_answer_that_another_incarnation_began_goes_on_in_its_grammar(tokenizer: FolderTokenizer) -> None:
    begun = tokenizer.encode('{"digit":4,"un')
    so_far = (Segment(0, 0, begun, (0.0,) * len(begun), _FIRST),)
    item = Item(0, 0, (5, 6), so_far, 50, Overrides(constraint=_GRAMMAR))
    answer = json.loads(tokenizer.decode(_tokens(harness.roll_out(_engine(tokenizer), [item])[0])))
    assert answer["digit"] == 4
    assert answer["unit"] in ("mm", "cm")


@pytest.mark.parametrize("grammar", ["start: %json {", 'start: %json {"not": {}}', "nonsense", ""])
def test_a_grammar_that_cannot_be_compiled_ends_its_turn_only(tokenizer: FolderTokenizer, grammar: str) -> None:
    bad = Item(50, 50, (5, 6), (), 50, Overrides(constraint=grammar))
    made = harness.roll_out(_engine(tokenizer), [*_items(1), bad])
    assert made[50] == []
    json.loads(tokenizer.decode(_tokens(made[0])))


def test_without_the_library_a_masked_turn_ends_at_once(
    tokenizer: FolderTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert harness.roll_out(_engine(tokenizer), _items(1))[0] == []
