from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.tests.support.roles import folders

pytestmark = pytest.mark.torch

TEXTS = ("What is 1 + 1?", "", "  two  spaces\n", "é 漢 🙂", "<turn>not a turn<end>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folders.tokenizer(tmp_path)
    return tmp_path


def test_prompt_of_a_chat_folder_equals_that_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain, chat = (open_tokenizer(ModelSpec(str(folder), chat=chat)) for chat in (False, True))
    assert (plain.size, plain.eos, plain.pad) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        asked = [{"role": "user", "content": text}]
        in_template = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        assert plain.prompt(text) == tuple(theirs(text)["input_ids"])
        assert plain.encode(text) == tuple(theirs(text, add_special_tokens=False)["input_ids"])
        assert chat.prompt(text) == tuple(theirs(in_template, add_special_tokens=False)["input_ids"])
        tokens = [token for token in plain.encode(text) if token not in plain.stop_tokens]
        assert plain.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_decoding_ends_at_the_first_stop_token_and_omits_special_tokens(folder: Path) -> None:
    folders.rewrite(folder / "generation_config.json", eos_token_id=[folders.END, folders.TURN])
    tokenizer = open_tokenizer(ModelSpec(str(folder)))
    assert (tokenizer.eos, tokenizer.stop_tokens) == (folders.END, frozenset({folders.END, folders.TURN}))
    for end in tokenizer.stop_tokens:
        assert tokenizer.decode((0, *tokenizer.encode("yes"), end, *tokenizer.encode("no"))) == "yes"
    # a model may have embeddings for more tokens than the tokenizer has
    assert tokenizer.decode((*tokenizer.encode("yes"), 100_000)) == "yes"


def test_description_for_people_has_all_tokens_and_no_unknown_id_fails(folder: Path) -> None:
    tokenizer = open_tokenizer(ModelSpec(str(folder)))
    text = tokenizer.describe((*tokenizer.encode("12"), tokenizer.eos, *tokenizer.encode("3"), -1, 2**30))
    assert text == f"12{tokenizer.describe([tokenizer.eos])}3"
    assert tokenizer.describe([tokenizer.eos])


def test_stop_tokens_fall_back_to_config_and_then_to_the_tokenizer(folder: Path) -> None:
    folders.rewrite(folder / "config.json", eos_token_id=folders.TURN)
    assert open_tokenizer(ModelSpec(str(folder))).stop_tokens == {folders.END, folders.TURN}
    folders.rewrite(folder / "tokenizer_config.json", eos_token=None, pad_token=None)
    tokenizer = open_tokenizer(ModelSpec(str(folder)))
    assert (tokenizer.eos, tokenizer.stop_tokens, tokenizer.pad) == (
        folders.TURN,
        frozenset({folders.TURN}),
        folders.TURN,
    )
    folders.rewrite(folder / "config.json", eos_token_id=None)
    with pytest.raises(ValueError, match="defines no end of sequence"):
        open_tokenizer(ModelSpec(str(folder)))


def test_chat_template_in_the_tokenizer_configuration_is_used(folder: Path) -> None:
    expected = open_tokenizer(ModelSpec(str(folder), chat=True)).prompt("x")
    (folder / "chat_template.jinja").unlink()
    for template in (folders.CHAT, [{"name": "tools", "template": "?"}, {"name": "default", "template": folders.CHAT}]):
        folders.rewrite(folder / "tokenizer_config.json", chat_template=template)
        assert open_tokenizer(ModelSpec(str(folder), chat=True)).prompt("x") == expected


def test_chat_template_supports_generation_marks_and_json_but_no_date(folder: Path) -> None:
    template = "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ strftime_now is defined }}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(ModelSpec(str(folder), chat=True))
    assert tokenizer.decode(tokenizer.prompt("<é>")) == '[{"role": "user", "content": "<é>"}]False'


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "has no chat template; remove `chat`, or add chat_template.jinja"),
        ("{% if %}", "the chat template of .* cannot be read"),
    ],
)
def test_a_chat_without_a_template_is_refused_when_it_is_opened(folder: Path, template: str | None, why: str) -> None:
    (folder / "chat_template.jinja").unlink()
    folders.rewrite(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=why):
        open_tokenizer(ModelSpec(str(folder), chat=True))


def test_a_prompt_that_the_template_refuses_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="the chat template cannot be applied to the prompt 'forbidden': not this"):
        open_tokenizer(ModelSpec(str(folder), chat=True)).prompt("forbidden")


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(ModelSpec(str(tmp_path)))


def test_store_and_reward_role_open_the_tokenizer_without_torch_or_transformers(folder: Path) -> None:
    code = (
        "import sys; from rrl.core.run_spec import ModelSpec; from rrl.roles.models.tokenizer import open_tokenizer;"
        f"print(open_tokenizer(ModelSpec({str(folder)!r}, chat=True)).prompt('x') != ());"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "set()"]
