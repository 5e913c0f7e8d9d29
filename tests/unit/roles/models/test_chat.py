from __future__ import annotations

import pytest

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.models.chat import UnknownRole, open_chat
from rrl.roles.models.conversation import Chat, Message
from rrl.roles.models.tokenizer import EOS

ASKED, ANSWERED, HINT = Message("user", "7"), Message("assistant", "12"), Message("tool", "<")


def chat(pieces: dict[str, str]) -> Chat:
    return open_chat(ModelSpec(tokenizer=TokenizerSpec((*"0123456789", "<", "|", "=", "!"), chat=pieces)))


def test_a_message_is_the_piece_of_its_role_and_an_answer_ends_with_the_end_of_sequence() -> None:
    made = chat({"user": "{content}=", "tool": "|{content}"})
    encode = made.tokenizer.encode
    assert made.prompt([ASKED]) == encode("7=")
    assert made.prompt([ASKED, ANSWERED, HINT]) == (*encode("7=12"), EOS, *encode("|<"))
    assert made.extend((5,), (6,), [ASKED, ANSWERED, HINT], 2) == (5, 6, EOS, *encode("|<"))
    assert made.extend((5,), (6, EOS), [ASKED, ANSWERED], 2) == (5, 6, EOS)


def test_what_surrounds_an_answer_in_its_piece_surrounds_the_sampled_one() -> None:
    made = chat({"user": "{content}", "tool": "{content}", "assistant": "={content}!"})
    encode = made.tokenizer.encode
    assert made.prompt([ASKED]) == encode("7=")
    assert made.extend((5,), (6,), [ASKED, ANSWERED, HINT], 2) == (5, 6, EOS, *encode("!<="))
    assert made.prompt([ASKED, ANSWERED, HINT]) == (*encode("7=12"), EOS, *encode("!<="))


def test_a_role_without_a_piece_is_named_with_those_that_have_one() -> None:
    with pytest.raises(UnknownRole, match="no piece for role 'system'; it has assistant, user"):
        chat({"user": "{content}"}).prompt([Message("system", "1")])


def test_a_piece_that_cannot_be_encoded_and_a_missing_template_are_mistakes_of_the_job() -> None:
    with pytest.raises(ValueError, match="no piece of"):
        chat({"assistant": "{content} end"})
    with pytest.raises(ValueError, match="needs `chat`"):
        open_chat(ModelSpec(tokenizer=TokenizerSpec(("1",))))
