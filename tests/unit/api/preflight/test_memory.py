"""The estimated memory of a trainer's rank, against the tensors of a real learner."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rrl.api.preflight import memory
from rrl.api.preflight.memory import memory_doubt, memory_text, rank_memory, tokens_of_pass
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.config.model_size import shape_of
from rrl.core.run_spec import RunSpec
from rrl.tests.support.job_toml import JOB

_BUILT = "[model]\nhidden_size = 48\nintermediate_size = 80\nlayers = 3\nheads = 6\nkv_heads = 2\nhead_dim = 10\n"


def _spec(trainer: str = "", model: str = _BUILT, cluster: str = "local") -> RunSpec:
    toml = JOB.replace("[model.tokenizer]", f"{model}[model.tokenizer]").replace('"local"', f'"{cluster}"')
    if "path" in model:
        toml = toml.replace('[model.tokenizer]\npieces = "0123456789+= "\n', "")
    return resolve(Job.model_validate(tomllib.loads(f"{toml}[roles.trainer]\n{trainer}")), "python")


def _nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_gradients_and_moments_are_those_of_a_learner() -> None:
    pytest.importorskip("torch")
    from rrl.roles.models.policy import skeleton
    from rrl.roles.trainer.learner import Learner

    spec = _spec()
    student = Learner(skeleton(spec.model, 2 + 13), spec.trainer, steps=9, temperature=1.0)
    estimated = rank_memory(spec)
    assert estimated is not None
    device = estimated.device
    assert device["weights"] == device["gradients"] == _nbytes(student.model.parameters())
    assert device["weights"] + device["moments"] == _nbytes(student.tensors().values())
    assert estimated.host["copies of the state"] == 4 * _nbytes(student.tensors().values())
    assert "reference" not in device
    assert "gathered weights" not in device


def test_adapters_of_a_folder_are_those_of_a_learner(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from rrl.core.run_spec import LoraSpec
    from rrl.tests.support.roles import folders
    from rrl.tests.support.roles.trainer import harness

    folder = folders.tied_llama(tmp_path / "llama")
    for targets in ((), ("q_proj", "mlp.down_proj")):
        lora = f"kl = 0.1\nlora = {{ rank = 3, targets = {list(targets)} }}"
        estimated = rank_memory(_spec(lora, f'[model]\npath = "{folder}"\n'))
        student = harness.adapted(folder, LoraSpec(3, 64.0, targets))
        trained = [parameter for parameter in student.model.parameters() if parameter.requires_grad]
        assert estimated is not None
        assert estimated.device["weights"] == _nbytes(student.model.parameters())
        assert estimated.device["gradients"] == _nbytes(trained)
        assert estimated.device["moments"] == 2 * _nbytes(trained)
        assert "reference" not in estimated.device, "it is the model without its adapters"


@pytest.mark.parametrize("kind", ["qwen3", "tied_llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_those_that_the_layers_keep(tmp_path: Path, kind: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.autograd.graph import saved_tensors_hooks

    from rrl.roles.models.policy import build_model
    from rrl.tests.support.roles import folders

    folder = getattr(folders, kind)(tmp_path / kind, hidden_size=64, intermediate_size=96)
    spec = _spec("activation_checkpointing = false", f'[model]\npath = "{folder}"\ndtype = "{dtype}"\n')
    model: Any = build_model(spec.model, 1, 0).to(getattr(torch, dtype))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}
    tokens = 96

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    shape = shape_of(spec.model)
    assert shape is not None
    size = {"float32": 4, "bfloat16": 2}[dtype]
    estimated = memory.pass_bytes(shape, tokens, size, checkpointing=False, trains_head=True)
    assert estimated["activations"] == pytest.approx(measured, rel=0.1)


def test_ranks_share_the_state_and_each_key_that_is_named_lowers_the_memory() -> None:
    one, four = (rank_memory(_spec(f"ranks = {ranks}")) for ranks in (1, 4))
    assert one is not None
    assert four is not None
    assert four.device["moments"] == one.device["moments"] // 4
    assert four.published == one.published
    spec = _spec("micro_batch_tokens = 4096\nkl = 0.1\ngpus = 1", _BUILT + "max_length = 1024\n")
    assert tokens_of_pass(spec) == 4096
    estimated = rank_memory(spec)
    assert estimated is not None
    saved = dict(memory._savings(spec, estimated))
    assert {"micro_batch_tokens = 2048", "activation_checkpointing = true"} <= saved.keys()
    for line in ("GPU of a rank     about", "host of a rank    about", "4,096 tokens in a pass", "less with         "):
        assert line in memory_text(spec)


def test_a_pass_has_at_most_the_share_of_a_rank() -> None:
    for ranks in (1, 4):
        spec = _spec(f"micro_batch_tokens = 1_000_000\nranks = {ranks}")
        step = spec.sampling.prompts_per_step * spec.sampling.group_size * 64
        assert tokens_of_pass(spec) == step // ranks


def test_optimizer_in_host_memory_leaves_the_gpu() -> None:
    there, here = (rank_memory(_spec(f"gpus = 1\noffload_optimizer = {flag}")) for flag in ("true", "false"))
    assert there is not None
    assert here is not None
    assert there.device == {name: size for name, size in here.device.items() if name != "moments"}
    assert there.host["optimizer"] == 2 * here.device["moments"], "moments, and a copy of weights and gradients"


def test_rank_without_enough_host_memory_is_a_doubt_that_names_what_to_lower() -> None:
    large = _BUILT.replace("48", "4096").replace("80", "8192") + "max_length = 4096\n"
    (doubt,) = memory_doubt(_spec("mem = '1GiB'", large, cluster="slurm"))
    assert doubt.startswith("roles.trainer.mem = 1GiB: a rank needs about ")
    assert "raise it, or write " in doubt
    assert "activation_checkpointing = true" in doubt
    assert memory_doubt(_spec("mem = '1TiB'", large, cluster="slurm")) == []
    assert memory_doubt(_spec("mem = '1GiB'", large)) == [], "virtual nodes do not limit memory"


def test_model_that_this_machine_lacks_is_unknown() -> None:
    spec = _spec("", '[model]\npath = "/nowhere"\nmax_length = 64\n')
    assert rank_memory(spec) is None
    assert memory_text(spec) == "unknown: this machine does not have the model"
    assert memory_doubt(spec) == []
