"""A text that certainly has too many tokens is refused by its bytes; any other text is encoded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from rrl.config.model_folder import TextTooLong
from rrl.roles.models.hf_tokenizer import FolderTokenizer, bytes_per_token
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.endpoint.tool_folders import make

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def by_byte(*more: str, normalizer: Any = None, pre_tokenizer: Any = BYTE_LEVEL, **added: bool) -> Tokenizer:
    """Return a tokenizer of bytes and further tokens, with a special token ``<end>``."""
    vocabulary = {token: place for place, token in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), *more))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[(token[0], token[1]) for token in more]))
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken("<end>", special=True, normalized=False, **added)])
    return made


def without_a_byte() -> Tokenizer:
    """Return a tokenizer without a token for the byte ``z``, which it drops."""
    vocabulary = {token: place for place, token in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"z"}))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = BYTE_LEVEL
    return made


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])
SEQUENCE = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), BYTE_LEVEL])
BOUNDED = {
    "bytes": by_byte(),
    "longer tokens": by_byte("12", "ĠĠ"),
    "split": by_byte(pre_tokenizer=SEQUENCE),
    "NFC": by_byte(normalizer=normalizers.NFC()),
    "digits": by_byte(pre_tokenizer=DIGITS),
    "nested": by_byte(normalizer=normalizers.Sequence([normalizers.Sequence([normalizers.NFC()])])),
}
UNBOUNDED = {
    "NFKC": by_byte(normalizer=normalizers.NFKC()),
    "strip": by_byte(normalizer=normalizers.Strip()),
    "lower case": by_byte(normalizer=normalizers.Lowercase()),
    "replaced": by_byte(normalizer=normalizers.Replace("  ", " ")),
    "removed": by_byte(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s"), "")])),
    "spaces of a special token": by_byte(lstrip=True),
    "dropped byte": without_a_byte(),
    "words": by_byte(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL])),
    "parts removed": by_byte(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])),
    "unknown words": Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}
TEXTS = st.text(
    st.sampled_from("ab 12\té\u0301\u212a\u1100\u1161\u11a8가<>🙂") | st.characters(codec="utf-8")
) | st.just("<end> ")
"""Texts with characters that NFC composes: a jamo syllable of 9 bytes becomes one of 3."""


def bound(tokenizer: Tokenizer) -> float:
    return bytes_per_token(json.loads(tokenizer.to_str()))


@examples(300, 20_000)
@given(st.sampled_from([*BOUNDED]), TEXTS)
def test_text_never_has_more_bytes_than_the_bound_allows_for_its_tokens(name: str, text: str) -> None:
    tokens = BOUNDED[name].encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= len(tokens) * bound(BOUNDED[name])


@examples(200, 20_000)
@given(st.text(st.characters(codec="utf-8")))
def test_canonical_form_takes_at_least_a_third_of_the_bytes(text: str) -> None:
    assert len(text.encode()) <= 3 * len(normalize("NFC", text).encode())


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizer_that_may_drop_text_has_no_bound(name: str) -> None:
    assert bound(UNBOUNDED[name]) == math.inf


def test_bound_is_that_of_the_longest_token() -> None:
    assert bound(by_byte()) == len("<end>")
    assert bound(by_byte("12", "34")) == len("<end>")
    longest = by_byte()
    longest.add_tokens([AddedToken("é" * 20, normalized=False)])
    assert bound(longest) == 40
    assert bound(by_byte(normalizer=normalizers.NFC())) == 3 * len("<end>")


def test_text_beyond_the_bound_is_refused_and_one_at_the_bound_is_encoded(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(make(tmp_path), chat=True)
    longest = max(map(len, ("<|endoftext|>", "</tool_response>")))
    tokenizer.limit_text(3)
    assert len(tokenizer.encode("a" * 3 * longest)) == 3 * longest
    with pytest.raises(TextTooLong, match=f"has {3 * longest + 1} bytes, and .* at most {3 * longest}"):
        tokenizer.encode("a" * (3 * longest + 1))
