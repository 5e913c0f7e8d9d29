"""vLLM and transformers load an exported folder, and continue a prompt with the same tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rrl.config.job.load import load_job
from rrl.examples.smollm2 import make_model
from rrl.roles.trainer.checkpoint_export import export_checkpoint
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.committed_run import CommittedRun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SMOLLM2 = Path(__file__).parents[2] / "examples" / "smollm2.toml"
TOKENS = 8
CONTINUE = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")
from vllm import LLM, SamplingParams
# bfloat16 would use AMX, which some machines announce and do not permit
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=2**28)
settings = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), ignore_eos=True)
(answer,) = engine.generate([sys.argv[2]], settings)
print("tokens:" + json.dumps(list(answer.outputs[0].token_ids)))
"""


def _continued_by_vllm(folder: Path, prompt: str) -> list[int]:
    command = [sys.executable, "-c", CONTINUE, str(folder), prompt, str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("tokens:"))
    return [int(token) for token in line.removeprefix("tokens:[").rstrip("]").split(",")]


def _continued_by_transformers(folder: Path, prompt: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokens = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in tokens[0, -TOKENS:]]


def test_vllm_continues_a_prompt_with_an_exported_folder_as_transformers_does(tmp_path: Path) -> None:
    model = {"head_dim": 32, "tokenizer": {"pieces": "0123456789="}, "max_length": 128}
    made = CommittedRun(tmp_path / "run", model)
    made.commit(1)
    export_checkpoint(made.run, None, tmp_path / "out")
    assert _continued_by_vllm(tmp_path / "out", "12=") == _continued_by_transformers(tmp_path / "out", "12=")


def test_vllm_continues_a_prompt_with_an_exported_tied_model_as_with_its_original_folder(tmp_path: Path) -> None:
    source = folders.tied_llama(tmp_path / "llama", head_dim=32)
    made = CommittedRun(tmp_path / "run", {"path": str(source)})
    made.commit(1, untrained=True)
    export_checkpoint(made.run, None, tmp_path / "out")
    assert _continued_by_vllm(tmp_path / "out", "12=") == _continued_by_vllm(source, "12=")


@pytest.mark.long  # the models above are exported in the same way
def test_smollm2_is_exported_as_it_was_before_training(tmp_path: Path) -> None:
    spec = load_job(SMOLLM2).model
    assert spec is not None
    assert spec.path == str(make_model.FOLDER.expanduser())
    subprocess.run([sys.executable, make_model.__file__], check=True)
    made = CommittedRun(tmp_path / "run", {"path": spec.path, "dtype": spec.dtype})
    made.commit(1, untrained=True)
    export_checkpoint(made.run, None, tmp_path / "out")
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, spec.dtype)).state_dict()
        for folder in (spec.path, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    text = "What is 12 + 30?"
    given, exported = (AutoTokenizer.from_pretrained(folder).encode(text) for folder in (spec.path, tmp_path / "out"))
    assert given == exported
    assert _continued_by_vllm(tmp_path / "out", text) == _continued_by_transformers(tmp_path / "out", text)
