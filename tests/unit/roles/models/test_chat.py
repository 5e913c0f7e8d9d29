from __future__ import annotations

import pytest

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.models.chat import UnknownRole, open_chat
from rrl.roles.models.conversation import Chat, Message
from rrl.roles.models.tokenizer import EOS

ASKED, ANSWERED, HINT = Message("user", "7"), Message("assistant", "12"), Message("tool", "<")


def chat(pieces: dict[str, str]) -> Chat:
    return open_chat(ModelSpec(tokenizer=TokenizerSpec((*"0123456789", "<", "|", "=", "!"), chat=pieces)))


def test_message_is_rendered_by_its_role_and_an_answer_ends_with_the_end_of_sequence() -> None:
    made = chat({"user": "{content}=", "tool": "|{content}"})
    encode = made.tokenizer.encode
    assert made.prompt([ASKED]) == encode("7=")
    assert made.prompt([ASKED, ANSWERED, HINT]) == (*encode("7=12"), EOS, *encode("|<"))
    assert made.extend((5,), (6,), [ASKED, ANSWERED, HINT], 2) == (5, 6, EOS, *encode("|<"))
    assert made.extend((5,), (6, EOS), [ASKED, ANSWERED], 2) == (5, 6, EOS)


def test_text_around_an_answer_in_its_template_surrounds_the_sampled_tokens() -> None:
    made = chat({"user": "{content}", "tool": "{content}", "assistant": "={content}!"})
    encode = made.tokenizer.encode
    assert made.prompt([ASKED]) == encode("7=")
    assert made.extend((5,), (6,), [ASKED, ANSWERED, HINT], 2) == (5, 6, EOS, *encode("!<="))
    assert made.prompt([ASKED, ANSWERED, HINT]) == (*encode("7=12"), EOS, *encode("!<="))


def test_role_without_a_template_is_refused_with_the_roles_that_have_one() -> None:
    with pytest.raises(UnknownRole, match="no piece for role 'critic'; it has assistant, user"):
        chat({"user": "{content}"}).prompt([Message("critic", "1")])


def test_template_that_cannot_be_encoded_or_is_missing_is_a_mistake_of_the_job() -> None:
    with pytest.raises(ValueError, match="no piece of"):
        chat({"assistant": "{content} end"})
    with pytest.raises(ValueError, match="needs `chat`"):
        open_chat(ModelSpec(tokenizer=TokenizerSpec(("1",))))
