from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.endpoint.key import EpisodeKey, decode_key, encode_key, run_key

SECRET = bytes(range(32))
KEY = EpisodeKey("guess-1", 7, 2)


@given(
    st.text(st.characters(codec="utf-8"), max_size=60),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(),
)
def test_valid_key_names_run_episode_and_attempt(run: str, episode: int, attempt: int, secret: bytes) -> None:
    key = EpisodeKey(run, episode, attempt)
    text = encode_key(key, secret)
    assert decode_key(text, run, secret) == key
    assert text.startswith("rrl-")
    assert not set(text) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def test_a_key_of_another_run_or_secret_is_not_valid() -> None:
    text = encode_key(KEY, SECRET)
    assert decode_key(text, "guess-2", SECRET) is None
    assert decode_key(text, "guess-1", bytes(32)) is None


def test_the_key_of_the_run_names_the_run_and_no_attempt() -> None:
    assert decode_key(run_key("guess-1", SECRET), "guess-1", SECRET) == EpisodeKey("guess-1", 0, 0)
    assert decode_key(run_key("guess-1", SECRET), "guess-2", SECRET) is None


@given(st.data())
def test_a_key_with_any_changed_bit_is_not_valid(data: st.DataObject) -> None:
    encoded = encode_key(KEY, SECRET).removeprefix("rrl-")
    signed = bytearray(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    bit = data.draw(st.integers(0, 8 * len(signed) - 1))
    signed[bit // 8] ^= 1 << bit % 8
    changed = "rrl-" + base64.urlsafe_b64encode(bytes(signed)).decode().rstrip("=")
    assert decode_key(changed, "guess-1", SECRET) is None


@given(st.one_of(st.text(), st.text(st.sampled_from("Aa0-_=")).map("rrl-".__add__)))
def test_text_that_is_no_key_is_rejected_without_an_exception(text: str) -> None:
    assert decode_key(text, "guess-1", SECRET) is None
