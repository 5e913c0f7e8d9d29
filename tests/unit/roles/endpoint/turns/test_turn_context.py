from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.endpoint.calls.call import Call, canonical_json, identified, next_hash, rolling_hashes
from rrl.roles.endpoint.turns.known_turns import KnownTurns
from rrl.roles.endpoint.turns.shown_answer import AnswerFormat, shown_answer
from rrl.roles.endpoint.turns.turn_context import Context, Paths, branch, chat_context, plain_context
from rrl.roles.models.chat import FolderChat, open_chat
from rrl.roles.models.conversation import Chat, Message
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.roles.endpoint.fake_turns import FakeTurns

PIECES = (*"0123456789", "12", "<", ">", "=", "?", "|")
SPEC = TokenizerSpec(PIECES, chat={"user": "?{content}=", "assistant": "{content}|"})
CHAT = open_chat(ModelSpec(tokenizer=SPEC))
LAST = CHAT.tokenizer.size - 1
CHATML = (
    "{%- for message in messages %}{{- '<start>' + message['role'] + '\\n' + message['content'] | trim + '<turn>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<start>assistant\\n' }}{%- endif %}"
)
"""A template like those of most models, with the special tokens of the test folder."""

answers = st.lists(st.integers(2, LAST), max_size=4).map(tuple)
texts = st.text(st.sampled_from("0123456789<>="), max_size=3)


def ask(chat: Chat, messages: list[Message], turns: list[Turn]) -> tuple[Context, Paths]:
    """Return the context of a conversation, and compare it with what comes of looking at every turn."""
    call = identified(Call("chat", "policy", tuple(messages)))
    known = KnownTurns(FakeTurns(), chat.tokenizer)
    answered = asyncio.run(known.newest_answer(0, call.hashes, turns, chat))
    assert answered == newest_of_all(call, turns, chat)
    context = chat_context(call, answered, chat)
    context = branch(context, turns) if context.parent is None else context
    assert context.conversation == rolling_hashes(messages)[-1]
    return context, Paths(turns)


def newest_of_all(call: Call, turns: list[Turn], chat: Chat) -> Turn | None:
    """Return the turn of the newest recorded answer, with its whole context, by showing the answer of each turn."""
    known = {prefix: count for count, prefix in enumerate(call.hashes, start=1)}
    answered, found = 0, None
    for turn in sorted(turns, key=lambda turn: turn.id):
        if turn.finished and turn.conversation in known:
            shown = shown_answer(turn.id, Paths(turns).context(turn.id), turn.sampled, AnswerFormat(), chat)
            if (count := known.get(next_hash(turn.conversation, shown), 0)) > answered:
                answered, found = count, turn
    if found is None:
        return None
    return msgspec.structs.replace(found, parent=None, offset=0, given=Paths(turns).context(found.id))


def record(turns: list[Turn], context: Context, sampled: tuple[int, ...]) -> Turn:
    """Add a turn that was sampled in a context, and return it."""
    made = Turn(
        2**40 + len(turns),
        context.parent,
        context.offset,
        context.given,
        sampled,
        True,
        context.conversation,
        1,
        f"r{len(turns)}",
    )
    turns.append(made)
    return made


def whole(context: Context, turns: list[Turn]) -> tuple[int, ...]:
    before = () if context.parent is None else Paths(turns).path(context.parent)[: context.offset]
    tokens = before + context.given
    assert tokens == context.tokens
    return tokens


@given(st.lists(st.tuples(texts, answers, st.booleans()), min_size=1, max_size=5), texts)
def test_continued_conversation_keeps_every_sampled_token(
    exchange: list[tuple[str, tuple[int, ...], bool]], last: str
) -> None:
    turns: list[Turn] = []
    messages: list[Message] = []
    expected: tuple[int, ...] = ()
    for question, tokens, ended in exchange:
        messages.append(Message("user", question))
        context, _ = ask(CHAT, messages, turns)
        expected += CHAT.tokenizer.encode(f"?{question}=")
        assert whole(context, turns) == expected
        sampled = (*tokens, EOS) if ended else (*tokens, LAST)
        made = record(turns, context, sampled)
        messages.append(Message("assistant", CHAT.tokenizer.decode(sampled)))
        expected += sampled if ended else (*sampled, EOS)  # a truncated answer gets its end token
        expected += CHAT.tokenizer.encode("|")
        assert Paths(turns).path(made.id) == whole(context, turns) + sampled
    context, _ = ask(CHAT, [*messages, Message("user", last)], turns)
    assert whole(context, turns) == expected + CHAT.tokenizer.encode(f"?{last}=")
    assert context.parent is not None


def test_answer_whose_text_encodes_differently_keeps_its_sampled_tokens() -> None:
    one, two = CHAT.tokenizer.encode("1") + CHAT.tokenizer.encode("2"), CHAT.tokenizer.encode("12")
    assert one != two
    turns: list[Turn] = []
    asked = [Message("user", "0")]
    made = record(turns, ask(CHAT, asked, turns)[0], (*one, EOS))
    context, paths = ask(CHAT, [*asked, Message("assistant", "12"), Message("user", "<")], turns)
    assert (context.parent, context.offset) == (made.id, len(paths.path(made.id)))
    assert context.given == CHAT.tokenizer.encode("|?<=")


@pytest.mark.parametrize("arguments", ['{"b": [1000], "a": 1}', '{"input": "{\\"b\\": [1000], \\"a\\": 1}"}'])
def test_arguments_that_javascript_encodes_again_are_the_same(arguments: str) -> None:
    assert canonical_json(arguments) == canonical_json('{"a": 1.0, "b": [1e3]}')


def test_an_answer_that_the_agent_changed_is_context_of_a_branch() -> None:
    turns: list[Turn] = []
    asked = [Message("user", "0")]
    first, _ = ask(CHAT, asked, turns)
    made = record(turns, first, (*CHAT.tokenizer.encode("5"), EOS))
    context, _ = ask(CHAT, [*asked, Message("assistant", "6"), Message("user", "<")], turns)
    assert (context.parent, context.offset) == (made.id, first.length)
    assert context.given == (*CHAT.tokenizer.encode("6"), EOS, *CHAT.tokenizer.encode("|?<="))


def test_unrelated_conversation_of_an_episode_has_a_parent_only_with_a_common_beginning() -> None:
    turns: list[Turn] = []
    record(turns, ask(CHAT, [Message("user", "0")], turns)[0], (EOS,))
    context, _ = ask(CHAT, [Message("assistant", "7"), Message("user", "8")], turns)
    assert (context.parent, context.offset) == (None, 0)
    context, _ = ask(CHAT, [Message("user", "09")], turns)
    assert (context.parent, context.offset) == (turns[0].id, 2)


def test_the_same_request_again_is_a_second_answer_in_the_same_context() -> None:
    turns: list[Turn] = []
    asked = [Message("user", "0")]
    first, _ = ask(CHAT, asked, turns)
    record(turns, first, (*CHAT.tokenizer.encode("5"), EOS))
    second, _ = ask(CHAT, asked, turns)
    assert (second.offset, second.given, second.length) == (first.length, (), first.length)


def test_the_newest_recorded_answer_counts_and_unfinished_ones_do_not() -> None:
    turns: list[Turn] = []
    messages = [Message("user", "0")]
    for guess in "56":
        record(turns, ask(CHAT, messages, turns)[0], (*CHAT.tokenizer.encode(guess), EOS))
        messages += [Message("assistant", guess), Message("user", "<")]
    context, paths = ask(CHAT, messages, turns)
    assert (context.parent, context.offset) == (turns[1].id, len(paths.path(turns[1].id)))
    pending = Turn(
        2**41, None, 0, (), CHAT.tokenizer.encode("6"), False, rolling_hashes(messages[:3])[-1], 1, "pending"
    )
    assert ask(CHAT, messages, [turns[0], pending])[0].parent == turns[0].id


@given(st.lists(st.lists(st.integers(2, LAST), max_size=6), min_size=1, max_size=4))
def test_a_completion_of_tokens_has_exactly_these_tokens_as_context(prompts: list[list[int]]) -> None:
    turns: list[Turn] = []
    for prompt in prompts:
        context = branch(plain_context(prompt), turns)
        assert whole(context, turns) == tuple(prompt)
        record(turns, context, (2, EOS))


def test_a_completion_that_continues_a_path_in_tokens_keeps_it() -> None:
    turns: list[Turn] = []
    made = record(turns, branch(plain_context([5, 6]), turns), (7, 8, EOS))
    assert branch(plain_context([5, 6, 7, 8, EOS, 9]), turns) == Context(made.id, 5, (9,), "", (5, 6, 7, 8, EOS, 9))


# ── a chat template of a folder ──────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def folder_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    pytest.importorskip("torch")
    from rrl.tests.support.roles import folders

    folder = tmp_path_factory.mktemp("model")
    folders.tokenizer(folder)
    Path(folder / "chat_template.jinja").write_text(CHATML)
    folders.rewrite(folder / "generation_config.json", eos_token_id=[folders.TURN])
    return open_chat(ModelSpec(str(folder), chat=True))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=5), st.lists(st.integers(4, 259), max_size=6), st.booleans()), max_size=4),
    st.text(max_size=5),
)
@pytest.mark.torch
def test_template_that_keeps_prefixes_keeps_every_sampled_token(
    folder_chat: Chat, exchange: list[tuple[str, list[int], bool]], last: str
) -> None:
    """The answers are random bytes, which are often not valid text, so that decoding and encoding would change them."""
    from rrl.tests.support.roles import folders

    turns: list[Turn] = []
    messages: list[Message] = []
    path: tuple[int, ...] = ()
    for question, tokens, ended in exchange:
        messages.append(Message("user", question))
        context, _ = ask(folder_chat, messages, turns)
        assert whole(context, turns)[: len(path)] == path
        sampled = (*tokens, folders.TURN) if ended else tuple(tokens)
        path = whole(context, turns) + sampled
        record(turns, context, sampled)
        messages.append(Message("assistant", folder_chat.tokenizer.decode(sampled)))
    context, _ = ask(folder_chat, [*messages, Message("user", last)], turns)
    assert whole(context, turns)[: len(path)] == path
    assert (context.parent is None) == (not exchange)
    if exchange and not exchange[-1][2]:
        assert context.given[0] == folders.TURN


@pytest.mark.torch
def test_template_that_renders_an_earlier_answer_differently_makes_a_branch(tmp_path: Path) -> None:
    from rrl.tests.support.roles import folders

    folders.tokenizer(tmp_path)
    chat = open_chat(ModelSpec(str(tmp_path), chat=True))
    turns: list[Turn] = []
    asked = [Message("user", "a")]
    first, _ = ask(chat, asked, turns)
    record(turns, first, (*chat.tokenizer.encode("b"), folders.END))
    context, _ = ask(chat, [*asked, Message("assistant", "b"), Message("user", "c")], turns)
    assert context.offset < first.length
    assert whole(context, turns) == chat.prompt([*asked, Message("assistant", "b"), Message("user", "c")])


ROLES = st.lists(st.tuples(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), texts), max_size=7)


@settings(max_examples=100, deadline=None)
@given(ROLES, ROLES)
@pytest.mark.torch
def test_text_after_an_answer_is_the_same_without_the_messages_before_it(
    folder_chat: FolderChat, before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    """The template shows each message apart, so only the first message and those after the answer are rendered."""
    tokenizer: Any = folder_chat.tokenizer
    assert tokenizer.shows_apart
    start = [("user", "0"), *before, ("assistant", "5")]
    messages = [Message(role, text) for role, text in [*start, *after]]
    extended = folder_chat.extend((7, 8), (9,), messages, len(start))
    rendered: list[int] = []
    render = tokenizer.render

    def counted(given: Sequence[Any], **more: Any) -> str:
        rendered.append(len(given))
        return str(render(given, **more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "render", counted)
        patch.setattr(tokenizer, "shows_apart", False)
        assert folder_chat.extend((7, 8), (9,), messages, len(start)) == extended
        whole = max(rendered)
        rendered.clear()
        patch.setattr(tokenizer, "shows_apart", True)
        folder_chat.extend((7, 8), (9,), messages, len(start))
    if not {"system", "developer"} & {role for role, _ in [*before, *after]}:
        assert max(rendered) == 2 + len(after) == whole - len(before)


NOT_APART = (
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}x{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ loop.index0 }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].role }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}.",
    "{% for m in messages %}{{ m.content ~ messages|length }}{% endfor %}",
    "{% for m in messages if m.role != 'x' %}{{ m.content }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set all = messages %}{% for m in messages %}{{ all[2].content }}{% endfor %}",
    "{% for m in messages %}{% if add_generation_prompt %}x{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ raise_exception(m.content) }}{% endfor %}",
    "{% set s = namespace(n=1) %}{% for m in messages %}{% set s.n = 2 %}{{ s.n ~ m.content }}{% endfor %}",
    "{% for m in messages %}{{ cycler('a', 'b').next() ~ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}",
    "",
)


def test_template_that_may_show_a_message_by_others_is_rendered_as_a_whole() -> None:
    pytest.importorskip("tokenizers")
    from rrl.roles.models.hf_tokenizer import shows_apart

    assert [template for template in NOT_APART if shows_apart(template)] == []
    assert shows_apart(CHATML)
    first = "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}x{% endif %}{{ m.content }}"
    assert shows_apart(f"{first}{{% endfor %}}{{% if add_generation_prompt %}}y{{% endif %}}")
