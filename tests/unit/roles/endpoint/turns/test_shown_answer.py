from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrl.core.run_spec import ModelSpec
from rrl.roles.endpoint.turns.shown_answer import AnswerFormat, end_at_stop, shown_answer, stable_text
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.tests.support.roles.endpoint.tool_folders import make


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ModelChat:
    folder: Path = make(tmp_path_factory.mktemp("model"))
    return open_chat(ModelSpec(str(folder), chat=True))


STOPS = st.lists(st.text("ab\né", min_size=1, max_size=3), max_size=3)
BYTES = st.lists(st.one_of(st.sampled_from([*b"ab\n", *"é".encode()]), st.integers(0, 255)), max_size=24)


def tokens_of(chat: ModelChat, sampled: list[int]) -> list[int]:
    """Return single bytes as tokens."""
    found = [chat.tokenizer.encode(chr(byte)) if byte < 128 else () for byte in sampled]
    accent = chat.tokenizer.encode("é")  # its two bytes
    return [token for byte, tokens in zip(sampled, found, strict=True) for token in (tokens or (accent[byte % 2],))]


@settings(max_examples=300, deadline=None)
@given(BYTES, STOPS)
@example(list(b"aab"), ["ab", "b"])
def test_streamed_text_equals_that_of_the_whole_answer_however_it_is_split(
    chat: ModelChat, sampled: list[int], stops: list[str]
) -> None:
    """The text that is sent after each token only grows, and no stop text removes a part of it."""
    tokens, tokenizer, stop = tokens_of(chat, sampled), chat.tokenizer, tuple(stops)
    whole = shown_answer(1, (), tokens, AnswerFormat(stop), chat).content
    assert not any(text in whole for text in stop)
    sent = ""
    for length in range(len(tokens) + 1):
        if end_at_stop(tokens[:length], stop, tokenizer) is not None:
            assert shown_answer(1, (), tokens[:length], AnswerFormat(stop), chat).content == whole
            break
        text = stable_text(tokens[:length], stop, tokenizer)
        assert text.startswith(sent)
        assert whole.startswith(text)
        sent = text


@settings(max_examples=200, deadline=None)
@given(BYTES, STOPS)
def test_an_answer_ends_with_the_token_that_completes_the_first_stop_text(
    chat: ModelChat, sampled: list[int], stops: list[str]
) -> None:
    tokens, stop = tokens_of(chat, sampled), tuple(stops)
    end = end_at_stop(tokens, stop, chat.tokenizer)
    complete = [
        length
        for length in range(len(tokens) + 1)
        if any(text in chat.tokenizer.decode(tokens[:length]) for text in stop)
    ]
    assert (end is None) == (not complete)
    if end is not None:
        assert end.length == complete[0]
        assert end_at_stop(tokens[: end.length], stop, chat.tokenizer) == end
