"""benchmarks/_recorded.py records the inputs and results of engines and learners, and finds a difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from rrl.benchmarks import _agents_deaths, _recorded
from rrl.benchmarks._recorded import Trained
from rrl.core.run_spec import TokenizerSpec
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.models.tokenizer import EOS, VocabularyTokenizer
from rrl.roles.rollout.engine import StepOutput
from rrl.roles.trajectories.durable.records import (
    AttemptFailed,
    AttemptStarted,
    EpisodeFinished,
    PackedSegment,
    Record,
    SegmentsAppended,
    TurnCreated,
    pack_tokens,
)
from rrl.roles.trajectories.types import Item, Segment

pytestmark = pytest.mark.torch

ROLLOUT = Incarnation(ReplicaId("rollout/0"), 1)
OLD, NEW = Version(1, 1), Version(2, 1)


class FakeEngine:
    """Returns one of the given segments with each step."""

    free_slots, has_work = 1, True

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = list(segments)

    def add(self, items: Sequence[Item]) -> None: ...

    def step(self) -> StepOutput:
        return [self._segments.pop(0)], []

    def flush(self) -> StepOutput:
        return [self._segments.pop(0)] if self._segments else [], []

    def abort(self, trajectories: Iterable[int]) -> None: ...


SEGMENTS = (Segment(7, 0, (5, 6), (-0.1, -0.2), OLD), Segment(7, 2, (8, EOS), (-0.3, -0.4), NEW))
SAMPLE = Trained(
    1, 0, 0, 3, 4, (2, 3), (5, 6, 9, 8), (-0.1, -0.2, 0.0, -0.3), (OLD, OLD, Version(-1, 0), NEW), ((2, 1),), 1.0
)
"""A sample: 5 and 6 were sampled after 2 and 3, 9 was given, and another turn sampled 8 after all of them."""


def record_engine(folder: Path, name: str, item: Item, segments: Sequence[Segment]) -> None:
    with (folder / f"rollout-{name}.jsonl").open("a") as file:
        engine = _recorded.RecordedEngine(FakeEngine(segments), _recorded._Record(file))  # type: ignore[arg-type]
        engine.add([item])
        engine.step()
        engine.flush()


def record_sample(folder: Path, sample: Trained) -> None:
    (folder / "trainer-1.jsonl").write_bytes(msgspec.json.encode(sample) + b"\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the records of the two turns in SAMPLE."""
    record_engine(tmp_path, "1", Item(7, 3, (2, 3)), SEGMENTS[:1])
    record_engine(tmp_path, "2", Item(9, 3, (2, 3, 5, 6, 9)), [Segment(9, 0, (8,), (-0.3,), NEW)])
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"tokens": (5, 7, 9, 8)}, 2),  # differs in the token itself, and in the context of the last token
        ({"tokens": (5, 6, 10, 8)}, 1),
        ({"prompt": (2, 4)}, 3),
        ({"logprobs": (-0.1, -0.25, 0.0, -0.3)}, 1),
        ({"versions": (OLD, OLD, Version(-1, 0), OLD)}, 1),
        ({"masked": ()}, 1),  # a given token is trained
    ],
)
def test_each_difference_from_the_sampled_tokens_counts_as_drift(
    changes: dict[str, tuple[object, ...]], differing: int, folder: Path
) -> None:
    record_sample(folder, msgspec.structs.replace(SAMPLE, **changes))
    assert _recorded.drift(folder)[0] == differing


def test_answer_continued_by_another_engine_keeps_its_context(tmp_path: Path) -> None:
    record_engine(tmp_path, "1", Item(7, 3, (2, 3)), SEGMENTS[:1])
    record_engine(tmp_path, "2", Item(7, 3, (2, 3), SEGMENTS[:1], 10), SEGMENTS[1:])
    record_sample(
        tmp_path,
        msgspec.structs.replace(
            SAMPLE, tokens=(5, 6, 8, EOS), logprobs=(-0.1, -0.2, -0.3, -0.4), versions=(OLD, OLD, NEW, NEW), masked=()
        ),
    )
    assert _recorded.drift(tmp_path) == (0, 4)
    assert _recorded.answers(tmp_path) >= {((2, 3), (5, 6, 8, EOS))}


def test_answers_whose_text_has_other_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = VocabularyTokenizer(TokenizerSpec(pieces=("a", "b", "ab")))  # ids 2, 3, 4
    for number, tokens in enumerate([(2, 3, EOS), (4, EOS), (2, 2, EOS)]):
        record_engine(
            tmp_path, str(number), Item(number, 0, (2,)), [Segment(number, 0, tokens, (-1.0,) * len(tokens), OLD)]
        )
    assert _recorded.text_changes(tmp_path, tokenizer) == (1, 3)


# ── the store's log of agents that die ─────────────────────────────────────────────────────────────────────────────
def turn(number: int, attempt: int, request: str, tokens: int) -> list[Record]:
    content = pack_tokens(tuple(range(tokens)))
    return [
        TurnCreated(number, 1, attempt, request, None, 0, pack_tokens((5,)), 9, ""),
        SegmentsAppended(ROLLOUT, (PackedSegment(number, 0, content, bytes(4 * tokens), 1, 1),), ()),
    ]


def read(records: Iterable[Record]) -> _agents_deaths.StoreLog:
    log = _agents_deaths.StoreLog()
    for record in records:
        log._add(record)
    return log


DEATH: list[Record] = [
    *turn(1, 1, "first", 6),
    AttemptFailed(1, 1, 0, "the process died", True),
    AttemptStarted(1, 2, Incarnation(ReplicaId("agents/0"), 2)),
]


def test_a_turn_that_is_sampled_again_is_counted() -> None:
    log = read([*DEATH, *turn(2, 2, "first", 4), EpisodeFinished(1, 2, (2,), 1.0)])
    assert log.resampled_tokens() == 4
    assert log.replayed_turns() == [False]
