from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import BPE

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.endpoint.turns.shown_answer import (
    AnswerFormat,
    GrowingText,
    _tokens_of,
    end_at_stop,
    shown_answer,
    stable_text,
)
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.models.hf_tokenizer import FolderTokenizer
from rrl.roles.models.tokenizer import Tokenizer, open_tokenizer
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


# ── decoding piece by piece ──────────────────────────────────────────────────────────────────────────────────────────
VOCABULARY = ModelSpec(tokenizer=TokenizerSpec(("a", "b", "é", "\n"), join=" ", chat={"user": "{content}"}))
PIECES = st.lists(st.lists(st.integers(0, 10**6), max_size=4), max_size=8)


def tokenizers_of(folder: Path) -> list[Tokenizer]:
    """Return tokenizers of several kinds: bytes, bytes as tokens of their own, and pieces with a separator."""
    spaces = Path(folder / "spaces")
    spaces.mkdir()
    vocabulary = {piece: number for number, piece in enumerate(["<s>", "</s>", "▁", "a", "▁a", "▁ab", "b", "é", "."])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + place for place, byte in enumerate((0xC3, 0xA9, 0xE4, 0xFF))}
    model = BPE(vocabulary, [], byte_fallback=True, unk_token="<s>")
    made = tokenizers.Tokenizer(model)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(spaces / "tokenizer.json"))
    (spaces / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return [
        open_tokenizer(ModelSpec(str(make(folder)))),
        FolderTokenizer(spaces, chat=False),
        open_tokenizer(VOCABULARY),
    ]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    smollm2 = Path("~/.cache/rrl/smollm2-135m-instruct").expanduser()
    real = [open_tokenizer(ModelSpec(str(smollm2)))] if smollm2.exists() else []
    return [*tokenizers_of(tmp_path_factory.mktemp("models")), *real]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), PIECES, st.lists(st.text("ab é\n.", min_size=1, max_size=3), max_size=2))
def test_text_that_grows_piece_by_piece_is_that_of_all_tokens(
    kinds: list[Tokenizer], kind: int, pieces: list[list[int]], stop: list[str]
) -> None:
    tokenizer = kinds[kind % len(kinds)]
    growing, tokens, stops = GrowingText(tokenizer, stop), [], tuple(stop)
    changes, before = kind % len(kinds) == 1, ""  # invalid bytes there also change the text of earlier bytes
    for piece in pieces:
        new = [token % tokenizer.size for token in piece]
        tokens += new
        growing.add(new)
        text = tokenizer.decode(tokens)
        if changes and not text.startswith(before):
            return
        before = text.rstrip("\ufffd")
        assert growing.length == len(tokens)
        assert growing.stable() == stable_text(tokens, stops, tokenizer)
        assert growing.stopped or not any(end in text for end in stop)
        if growing.stopped:
            assert any(end in text for end in stop)
            return


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), PIECES, st.lists(st.text("ab é\n.", min_size=1, max_size=3), min_size=1, max_size=2))
def test_end_at_a_stop_text_is_that_of_a_search_over_all_tokens(
    kinds: list[Tokenizer], kind: int, pieces: list[list[int]], stop: list[str]
) -> None:
    tokenizer, stops = kinds[kind % len(kinds)], tuple(stop)
    tokens = [token % tokenizer.size for piece in pieces for token in piece]
    end = end_at_stop(tokens, stops, tokenizer)

    def cut(length: int) -> int:
        text = tokenizer.decode(tokens[:length]).rstrip("\ufffd" if length < len(tokens) else "")
        return min((place for place in map(text.find, stop) if place >= 0), default=-1)

    found = [length for length in range(1, len(tokens) + 1) if cut(length) >= 0]
    if cut(len(tokens)) < 0:
        assert end is None
    elif found == list(range(found[0], len(tokens) + 1)):  # a later token takes no stop text back
        assert end is not None
        assert (end.length, end.text) == (found[0], tokenizer.decode(tokens[: found[0]])[: cut(found[0])])
    else:
        assert end is not None
        assert cut(end.length) >= 0


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), PIECES, st.integers(0, 40))
def test_tokens_before_a_stop_text_are_those_of_a_search_from_the_end(
    kinds: list[Tokenizer], kind: int, pieces: list[list[int]], cut: int
) -> None:
    tokenizer = kinds[kind % len(kinds)]
    tokens = [token % tokenizer.size for piece in pieces for token in piece]
    text = tokenizer.decode(tokens)[:cut]
    lengths = range(len(tokens), -1, -1)
    longest = next(length for length in lengths if text.startswith(tokenizer.decode(tokens[:length])))
    assert _tokens_of(text, tokens, tokenizer) == tuple(tokens[:longest])
