"""transformers loads the run's model and tokenizer from the files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.models.hf_folder import write_model_files
from rrl.roles.models.policy import skeleton
from rrl.roles.models.tokenizer import EOS, PAD, VocabularyTokenizer
from rrl.tests.support.roles import folders

pytestmark = pytest.mark.torch

DIGITS = TokenizerSpec(pieces=(*"0123456789=", "12", "**"), join=" ", ignore="[], ")
WORDS = TokenizerSpec(pieces=("ab", "a", "b", ".", "^", "<pad>"))
NOT_COMPARED = ("dtype", "eos_token_id", "pad_token_id", "_name_or_path", "architectures", "transformers_version")


def test_config_of_a_built_model_is_that_of_the_model(tmp_path: Path) -> None:
    spec = ModelSpec(hidden_size=48, heads=6, kv_heads=3, head_dim=8, layers=3, max_length=99, tokenizer=DIGITS)
    written = write_model_files(spec, tmp_path)
    assert written[-1].name == "config.json"
    config = AutoConfig.from_pretrained(tmp_path)
    model: Any = skeleton(spec, VocabularyTokenizer(DIGITS).size)
    expected = model.config
    assert (config.eos_token_id, config.pad_token_id, config.architectures) == (EOS, PAD, ["Qwen3ForCausalLM"])
    left, right = config.to_dict(), expected.to_dict()
    assert {name: left.get(name) for name in right if name not in NOT_COMPARED} == {
        name: value for name, value in right.items() if name not in NOT_COMPARED
    }


@pytest.mark.parametrize("spec", [DIGITS, WORDS], ids=["digits", "words"])
def test_tokenizer_of_a_built_model_encodes_and_decodes_as_the_run_does(tmp_path: Path, spec: TokenizerSpec) -> None:
    write_model_files(ModelSpec(tokenizer=spec), tmp_path)
    own, written = VocabularyTokenizer(spec), AutoTokenizer.from_pretrained(tmp_path)
    texts = ("[1, 212] = 3", "12**0") if spec is DIGITS else ("abaab.^a", "b<pad>", "")
    for text in texts:
        ids = own.encode(text)
        assert tuple(written.encode(text)) == ids
        assert written.decode(ids) == own.decode(ids)
    assert (written.eos_token_id, written.pad_token_id, len(written)) == (EOS, PAD, own.size)
    with pytest.raises(Exception, match="Missing"):
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("?")


def test_files_of_a_folder_are_copied_and_the_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    source, target = folders.tied_llama(tmp_path / "source"), tmp_path / "target"
    (source / "LICENSE.txt").write_text("terms")
    (source / "generation_config.json").unlink(missing_ok=True)
    target.mkdir()
    write_model_files(ModelSpec(path=str(source), dtype="bfloat16"), target)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert after == before | {"dtype": "bfloat16"}
    assert (target / "LICENSE.txt").read_text() == "terms"
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": folders.END}
    assert not list(target.glob("*.safetensors"))
    text = "Zwölf [7]"
    assert AutoTokenizer.from_pretrained(target).encode(text) == AutoTokenizer.from_pretrained(source).encode(text)


def test_dtype_is_changed_under_the_name_that_the_file_has(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    nested = {"torch_dtype": "float32", "text_config": {"torch_dtype": "float32", "n": 1}}
    (source / "config.json").write_text(json.dumps(nested))
    write_model_files(ModelSpec(path=str(source), dtype="bfloat16"), target)
    written = json.loads((target / "config.json").read_text())
    assert written == {"torch_dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "n": 1}}


def test_removed_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone/config\.json does not exist"):
        write_model_files(ModelSpec(path=str(tmp_path / "gone")), tmp_path)
