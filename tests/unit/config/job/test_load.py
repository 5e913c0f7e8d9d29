from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.config.job.load import SpecError, load_job, resolved
from rrl.config.job.render import as_toml
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.phases import PHASES
from rrl.core.run_spec import Limits
from rrl.tests.support.examples import examples
from rrl.tests.support.job_toml import JOB
from rrl.tests.support.plain_user import call_as


def error_text(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "job.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as raised:
        load_job(path)
    return str(raised.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("given", "found"), [("models/a", "models/a"), ("../b", "../b"), ("/shared/c", "/shared/c"), ("~/d", "/home/me/d")]
)
def test_model_path_is_relative_to_the_job_or_the_given_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "job.toml"
    text = JOB.replace('[model.tokenizer]\npieces = "0123456789+= "\n', f'[model]\npath = "{given}"\n')
    path.write_text(text)
    for folder, job in ((tmp_path, load_job(path)), (Path("/elsewhere"), load_job(path, Path("/elsewhere")))):
        assert job.model is not None
        assert job.model.path == os.path.normpath(folder / found)
        spec = resolved(job)["model"]
        assert spec == {
            "path": job.model.path,
            "dtype": "float32",
            "chat": False,
            "max_length": None,
            "tokenizer": None,
            "tool_parser": None,
        }
        path.write_text(as_toml(job))
        assert load_job(path).model == job.model  # the written file can be read again, from any folder
        path.write_text(text)


def test_built_model_gets_its_length_filled_in(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert resolved(load_job(tmp_path / "job.toml"))["model"]["max_length"] == 64


def test_a_valid_job_is_loaded_with_its_values(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    job = load_job(tmp_path / "job.toml")
    assert (job.run.name, job.run.steps, job.cluster.node.mem) == ("small", 10, 4 * 2**30)
    assert job.roles.rollout.env == {"FOO": "bar"}
    assert job.faults.planned[0].target == "rollout/0"


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + JOB.replace("\n", "\r\n").encode())
    assert load_job(tmp_path / "job.toml").run.name == "small"


def test_run_spec_of_the_manager_has_the_phases_as_the_job_changes_them(tmp_path: Path) -> None:
    own = '[phases.train]\nlongest = "8h"\n[phases."my eval"]\nlongest = "2h"\nprogresses = false\n'
    (tmp_path / "job.toml").write_text(JOB + own)
    limits = resolve(load_job(tmp_path / "job.toml"), "python").limits
    train, mine = limits.phase("train"), limits.phase("my eval")
    assert (train.shortest, train.longest, train.computes) == (PHASES["train"].shortest, 28800.0, True)
    assert (mine.longest, mine.progresses, mine.waits_for) == (7200.0, False, None)
    assert limits.phase("score") == PHASES["score"]
    assert [limits.is_known_phase(name) for name in ("score", "my eval", "of nobody")] == [True, True, False]
    assert msgspec.json.decode(msgspec.json.encode(limits), type=Limits) == limits, (
        "the limits differ after they were written to the journal and read again"
    )


def test_the_resolved_spec_names_every_field_and_is_json(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    spec = json.loads(json.dumps(resolved(load_job(tmp_path / "job.toml")), allow_nan=False))
    assert set(spec) == set(Job.model_fields)
    assert spec["cluster"]["walltime"] == 86400.0
    assert spec["roles"]["rollout"]["min_replicas"] == 1
    assert spec["roles"]["trainer"]["min_replicas"] == 1
    assert spec["task"]["args"] == {"min_terms": 2, "seeds": [1, 2]}


WRONG: list[tuple[str, str, str]] = [
    # (text that is replaced in JOB, replacement, the whole error message)
    ("replicas = 2", "replica = 2", 'job.toml:17: roles.rollout.replica: unknown key; did you mean "replicas"?'),
    ("[task]", "[eval]\nevery = 0\n[task]", "job.toml:13: eval.every: must be at least 1, not 0"),
    (
        "[task]",
        "[eval]\nevery = 5\nsamples = 2\n[task]",
        "job.toml:14: eval.samples: would all be equal at temperature = 0; write samples = 1, or a temperature above 0",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'function = "a:b"\n[eval]\nevery = 5',
        "job.toml:14: eval.task: missing; the function"
        " of [task] is trained on: write a table [eval.task] with other prompts",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'function = "a:b"\n[roles.endpoint]\n[eval]\nevery = 5',
        "job.toml:15: eval.task: missing; the function"
        " of [task] is trained on: write a table [eval.task] with other prompts",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "a" }, { path = "b.jsonl", name = "a" }]',
        'job.toml:13: task.files[1].name: "a" is the name of another file; write another name',
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        '[[task.files]]\npath = "a.jsonl"\nname = "a"\n[[task.files]]\npath = "./a.jsonl"\nname = "b"',
        "job.toml:17: task.files[1].path: is named above; remove this file, and raise the weight of the other",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "a", weight = 0 }]',
        "job.toml:13: task.files[0].weight: is 0 like that of all files, so nothing is trained on; raise one",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "a", weight = -1 }]',
        "job.toml:13: task.files[0].weight: must be at least 0, not -1",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "A" }]',
        'job.toml:13: task.files[0].name: must be a letter, then up to 29 lower-case letters, digits, - and _, not "A"',
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.txt", name = "a" }]',
        "job.toml:13: task.files[0].path: 'a.txt' is not the name of a file that rrl reads; it must end with .jsonl or"
        " .parquet",
    ),
    (
        'dataset = "chain_sum"\nargs',
        'files = [{ path = "a.jsonl", name = "a" }]\nargs',
        "job.toml:14: task.args: has no effect with `files`; remove this key",
    ),
    (
        "[task]\ndataset",
        '[eval]\nevery = 5\ntask.files = [{ path = "a.jsonl", name = "a", weight = 2 }]\n[task]\ndataset',
        "job.toml:14: eval.task.files[0].weight: has no effect: an evaluation has as many prompts of each file; remove"
        " this key",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "a" }, { path = "b.jsonl", name = "b" }]\n[eval]\nevery = 5\n'
        'task.file = "./b.jsonl"',
        "job.toml:16: eval.task.file: is a file of [task], whose rows are trained on; name another file",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\n[eval]\nevery = 5\ntask.files = [{ path = "a.jsonl", name = "a" }]',
        "job.toml:16: eval.task.files[0].path: is the file of [task], whose rows are trained on; name another file",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'files = [{ path = "a.jsonl", name = "a" }]\n[eval]\nevery = 5',
        "job.toml:14: eval.task: missing; the file of [task] is trained on: write a table [eval.task] with other prompts",
    ),
    (
        'dataset = "chain_sum"',
        'dataset = "chain_sum"\nrewards.right.function = "a:b"',
        "job.toml:14: task.rewards: has no effect with `dataset`; remove this key",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\nreward = "a:b"\nrewards.right.function = "a:b"',
        "job.toml:14: task.reward: is the only reward, but there is [task.rewards] too; remove one of both",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\npartial_credit = 0.5\nrewards.right.function = "a:b"',
        "job.toml:14: task.partial_credit: is not added to several rewards: return two numbers in one of them; remove"
        " this key",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\n[task.rewards.right]\nfunction = "a:b"\nweight = 0',
        "job.toml:16: task.rewards.right.weight: is 0 like that of all rewards, so all answers would be equal; write"
        " another number for one",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\nrewards.right = { function = "a:b", weight = inf }',
        "job.toml:14: task.rewards.right.weight: is inf; write a finite number",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\nrewards.source_b.function = "a:b"',
        "job.toml:14: task.rewards.source_b: reward_source_b is the name of another figure of a step; rename this reward",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\nrewards.Right.function = "a:b"',
        "job.toml:14: task.rewards: 'Right' is not a valid name of a reward; use a letter, then up to 29 lower-case"
        " letters, digits and _",
    ),
    (
        "[task]\ndataset",
        '[eval]\nevery = 5\ntask = { file = "a.jsonl", partial_credit = 0.5 }\n[task]\ndataset',
        "job.toml:14: eval.task.partial_credit: has no effect: nothing is trained on; remove this key",
    ),
    (
        "[task]\ndataset",
        '[eval]\nevery = 5\ntask = { file = "a.jsonl", size = 5 }\n[task]\ndataset',
        "job.toml:14: eval.task.size: has no effect with `file`; remove this key",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\n[eval]\nevery = 5\ntask = { file = "a.jsonl" }',
        "job.toml:16: eval.task.file: is the file of [task], whose rows are trained on; name another file",
    ),
    (
        'dataset = "chain_sum"\nargs = { min_terms = 2, seeds = [1, 2] }',
        'file = "a.jsonl"\n[eval]\nevery = 5\ntask = { file = "./b/../a.jsonl" }',
        "job.toml:16: eval.task.file: is the file of [task], whose rows are trained on; name another file",
    ),
    (
        "[task]",
        "[roles.trainer.lora]\nrank = 8\n[task]",
        "job.toml:12: roles.trainer.lora: adapts a trained model, but [model] has no path, so that the model is new;"
        " remove this table, or set path",
    ),
    (
        "[task]",
        "[roles.trainer.lora]\nrank = 0\n[task]",
        "job.toml:13: roles.trainer.lora.rank: must be at least 1, not 0",
    ),
    (
        "[task]",
        "[roles.trainer]\nexport = 0\n[task]",
        'job.toml:13: roles.trainer.export: must be "end" or at least 1, not 0',
    ),
    (
        "[task]",
        '[roles.trainer]\nexport = "last"\n[task]',
        'job.toml:13: roles.trainer.export: must be "end" or a whole number, not "last"',
    ),
    (
        "[task]",
        "[roles.trainer]\ncheckpoint_every = 0\n[task]",
        "job.toml:13: roles.trainer.checkpoint_every: must be at least 1, not 0",
    ),
    (
        "[task]",
        "[roles.trainer]\ncheckpoint_every = 2\nexport = 1\n[task]",
        "job.toml:14: roles.trainer.export: step 1"
        " would have no checkpoint; write a multiple of checkpoint_every = 2 ([roles.trainer])",
    ),
    (
        "[task]",
        "[roles.trainer]\ncheckpoint_every = 2\n[eval]\nevery = 1\n[task]",
        "job.toml:15: eval.every: step 1 would"
        " have no checkpoint; write a multiple of checkpoint_every = 2 ([roles.trainer])",
    ),
    (
        "[task]",
        "[roles.trainer]\ndual_clip = 1.2\n[task]",
        "job.toml:13: roles.trainer.dual_clip: 1.2 is not more than 1 + clip = 1.2; raise it, or lower clip",
    ),
    (
        "[task]",
        "[roles.trainer]\nclip = 2.5\n[task]",
        "job.toml:12: roles.trainer.dual_clip: 3 is not more than 1 + clip = 3.5; raise it, or lower clip",
    ),
    (
        "[task]",
        "[roles.trainer]\nclip_high = 2.0\n[task]",
        "job.toml:12: roles.trainer.dual_clip: 3 is not more than 1 + clip_high = 3; raise it, or lower clip_high",
    ),
    (
        "[task]",
        "[roles.trainer]\ncispo_max = 4.0\n[task]",
        'job.toml:13: roles.trainer.cispo_max: is a key of loss = "cispo", not of "grpo"; remove this key, or change'
        " loss",
    ),
    (
        "[task]",
        '[roles.trainer]\nloss = "gspo"\nclip = 0.3\n[task]',
        'job.toml:14: roles.trainer.clip: is a key of loss = "grpo", not of "gspo"; remove this key, or change loss',
    ),
    (
        "[task]",
        '[roles.trainer]\nschedule = "constant"\nfinal_learning_rate = 0.5\n[task]',
        'job.toml:14: roles.trainer.final_learning_rate: has no effect with schedule = "constant"; remove this key',
    ),
    (
        "[task]",
        "[roles.trainer]\nadvantage_std = false\nadvantage_floor = 0.5\n[task]",
        "job.toml:14: roles.trainer.advantage_floor: has no effect with advantage_std = false; remove this key",
    ),
    (
        "[task]",
        '[roles.trainer]\nratio_mask_by = "sequence"\n[task]',
        "job.toml:13: roles.trainer.ratio_mask_by: has no effect with no ratio_mask; remove this key",
    ),
    (
        "[task]",
        "[roles.trainer]\nratio_mask = [2.0, 0.5]\n[task]",
        "job.toml:13: roles.trainer.ratio_mask: [2, 0.5] has no ratio in it; write the smaller bound first",
    ),
    ("[cluster]", "[clutser]", 'job.toml:5: clutser: unknown key; did you mean "cluster"?'),
    ("cpus = 4", "cpu = 4", 'job.toml:7: cluster.node.cpu: unknown key; did you mean "cpus"?'),
    (
        'kind = "local"',
        "learning_rate = 1.0",
        "job.toml:6: cluster.learning_rate: unknown key; it belongs in [roles.trainer]",
    ),
    ('kind = "local"', "group_size = 5", "job.toml:6: cluster.group_size: unknown key; it belongs in [sampling]"),
    ("cpus = 4", "threads = 4", "job.toml:7: cluster.node.threads: unknown key; known here: cpus, gpus, mem"),
    (
        'at = "step=5"',
        'at = "step=5"\nwhen = 1',
        "job.toml:24: faults.planned[0].when: unknown key; known here: kind, target, at, seconds, amount",
    ),
    ("[roles.rollout]", "[rollout]", "job.toml:16: rollout: unknown key; did you mean [roles.rollout]?"),
    ("steps = 10", 'steps = 10\n"a b" = 1', 'job.toml:4: run."a b": unknown key; known here: name, steps, seed'),
    (
        "steps = 10\n",
        "",
        "job.toml:1: run.steps: missing; add steps = ... in [run] (optimizer steps of a complete run)",
    ),
    (
        'at = "step=5"\n',
        "",
        "job.toml:20: faults.planned[0].at: missing; add at = ... in [[faults.planned]]"
        ' (trigger: "step=5" (the trainer has committed that step), "time=90s" (since the first nodes were granted)'
        ' or "phase=train" (its target is in that phase))',
    ),
    (
        '[model.tokenizer]\npieces = "0123456789+= "\n',
        "",
        "job.toml: model: missing; the built-in role trajectories needs path in [model], or [model.tokenizer] with"
        " pieces; or set command in [roles.trajectories]",
    ),
    (
        '[model.tokenizer]\npieces = "0123456789+= "\n',
        "[model]\nlayers = 1\n",
        "job.toml:9: model.tokenizer: missing; add a table [model.tokenizer] with pieces, or path in [model] to a Hugging"
        " Face folder",
    ),
    (
        '[model.tokenizer]\npieces = "0123456789+= "\n',
        '[model]\npath = "m"\nlayers = 2\n',
        "job.toml:11: model.layers: comes from config.json of the model folder; remove this key, or remove path",
    ),
    (
        "[model.tokenizer]",
        '[model]\npath = "m"\n[model.tokenizer]',
        "job.toml:11: model.tokenizer: comes from the model folder; remove this key, or remove path",
    ),
    (
        "[model.tokenizer]",
        "[model]\nchat = true\n[model.tokenizer]",
        "job.toml:10: model.chat: needs path: a model that rrl builds has no chat template; remove this key",
    ),
    (
        "[model.tokenizer]",
        '[model]\ntool_parser = "qwen3"\n[model.tokenizer]',
        "job.toml:10: model.tool_parser: needs the chat template of the model folder; write chat = true, or remove this key",
    ),
    (
        '[model.tokenizer]\npieces = "0123456789+= "\n',
        '[model]\npath = "m"\nmax_length = 5\n',
        "job.toml: sampling.max_new_tokens: 5 leaves no space for a prompt in [model] max_length = 5; lower it or"
        " raise max_length",
    ),
    (
        "[model.tokenizer]",
        '[model]\ndtype = "bf16"\n[model.tokenizer]',
        'job.toml:10: model.dtype: must be "float32" or "bfloat16", not "bf16"; did you mean "bfloat16"?',
    ),
    ("steps = 10", 'steps = "10"', 'job.toml:3: run.steps: must be a whole number, not "10"'),
    ("steps = 10", "steps = true", "job.toml:3: run.steps: must be a whole number, not true"),
    ("steps = 10", "steps = 10.0", "job.toml:3: run.steps: must be a whole number, not 10.0"),
    ("steps = 10", "steps = 0", "job.toml:3: run.steps: must be at least 1, not 0"),
    ("steps = 10", "steps = [1]", "job.toml:3: run.steps: must be a whole number, not a list"),
    (
        "steps = 10",
        "steps = 99999999999999999999",
        "job.toml:3: run.steps: is a number beyond 64 bits; write a number that fits into 64 bits",
    ),
    ("replicas = 2", "replicas = 20000", "job.toml:17: roles.rollout.replicas: must be at most 4096, not 20000"),
    (
        'name = "small"',
        'name = "Small one"',
        'job.toml:2: run.name: must be a letter, then up to 30 lower-case letters, digits and dashes, not "Small one"',
    ),
    (
        'kind = "local"',
        'kind = "slrum"',
        'job.toml:6: cluster.kind: must be "local" or "slurm", not "slrum"; did you mean "slurm"?',
    ),
    (
        'kind = "kill"',
        'kind = "explode"',
        'job.toml:21: faults.planned[0].kind: must be "kill", "freeze",'
        ' "slow", "exit", "exception", "out_of_memory", "engine_dead", "kill_step", "crash", "cut", "delay", "disk_full" or'
        ' "outage", not "explode"',
    ),
    ('"4GiB"', "4", 'job.toml:7: cluster.node.mem: a size needs a unit; write for example "4MiB"'),
    ('"4GiB"', "-4", 'job.toml:7: cluster.node.mem: a size needs a unit; write for example "512MiB"'),
    (
        '"4GiB"',
        '"4 gigs"',
        'job.toml:7: cluster.node.mem: \'4 gigs\' is not a size; write for example "16GiB" or "512MiB"',
    ),
    (
        "[task]",
        "[limits]\nlease = 5\n[task]",
        'job.toml:13: limits.lease: a duration needs a unit; write for example "5s"',
    ),
    (
        "[task]",
        '[limits]\njoin = "1 day"\n[task]',
        'job.toml:13: limits.join: \'1 day\' is not a duration; write for example "90s", "15min", "2h" or "1-12:00:00"',
    ),
    ("[task]", '[limits]\nheartbeat = "0s"\n[task]', 'job.toml:13: limits.heartbeat: must be more than 0, not "0s"'),
    (
        "[task]",
        '[limits]\nheartbeat = "1s"\nsilence = "2s"\n[task]',
        'job.toml:14: limits.silence: "2s" is less than three heartbeats of "1s"; raise it to "3s"',
    ),
    (
        "[task]",
        '[limits]\nheartbeat = "10s"\n[task]',
        'job.toml:12: limits.silence: "10s" is less than three heartbeats of "10s"; raise it to "30s"',
    ),
    (
        "[task]",
        "[roles.trainer]\nlearning_rate = inf\n[task]",
        "job.toml:13: roles.trainer.learning_rate: is inf; write a finite number",
    ),
    (
        "seeds = [1, 2]",
        "seeds = [1, 2024-01-01]",
        "job.toml:14: task.args.seeds[1]: is a date or time; write it as text, in quotes",
    ),
    ('FOO = "bar"', "FOO = 3", "job.toml:18: roles.rollout.env.FOO: must be text in quotes, not 3"),
    (
        'FOO = "bar"',
        '"F=" = "3"',
        "job.toml:18: roles.rollout.env: 'F=' is not a valid environment variable name;"
        " use letters, digits and underscores",
    ),
    ('FOO = "bar"', r'FOO = "\u0000"', "job.toml:18: roles.rollout.env.FOO: contains a NUL character (\\u0000)"),
    ("replicas = 2", "command = []", "job.toml:17: roles.rollout.command: must be something that is not empty, not []"),
    ("replicas = 2", 'command = "x"', 'job.toml:17: roles.rollout.command: must be a list, as in ["a", "b"], not "x"'),
    (
        "replicas = 2",
        "min_replicas = 2",
        "job.toml:17: roles.rollout.min_replicas: 2 is more than replicas = 1; lower it or raise replicas",
    ),
    (
        "replicas = 2",
        "replicas = 2\ncpus = 8",
        "job.toml:18: roles.rollout.cpus: 8 is more than a node has"
        " ([cluster.node] cpus = 4); lower it or raise cpus of the node",
    ),
    (
        "replicas = 2",
        'replicas = 2\nmem = "8GiB"',
        'job.toml:18: roles.rollout.mem: "8192MiB" is more than a node'
        ' has ([cluster.node] mem = "4096MiB"); lower it or raise mem of the node',
    ),
    (
        "rollout/0",
        "rollout/7",
        'job.toml:22: faults.planned[0].target: no replica "rollout/7"; role rollout has 2, the last is "rollout/1"',
    ),
    (
        "rollout/0",
        "judge/0",
        'job.toml:22: faults.planned[0].target: no role "judge"; there are trajectories, reward, trainer, rollout',
    ),
    (
        "rollout/0",
        "rollouts",
        'job.toml:22: faults.planned[0].target: no role "rollouts"; there are trajectories,'
        ' reward, trainer, rollout; a replica is written "rollout/0"',
    ),
    (
        "step=5",
        "step5",
        'job.toml:23: faults.planned[0].at: \'step5\' is not a valid trigger; write "step=5", "time=90s" or'
        ' "phase=train"',
    ),
    (
        "step=5",
        "time=5",
        'job.toml:23: faults.planned[0].at: \'5\' is not a duration; write for example "90s", "15min",'
        ' "2h" or "1-12:00:00"',
    ),
    ('kind = "kill"', 'kind = "cut"', "job.toml:21: faults.planned[0].kind: cut needs seconds: its duration"),
    (
        'kind = "kill"',
        'kind = "slow"\namount = 2.0',
        "job.toml:21: faults.planned[0].kind: slow needs amount, the"
        " share of the time in which the target runs, between 0 and 1",
    ),
    (
        "[[faults.planned]]",
        "[faults.planned]",
        "job.toml:20: faults.planned: must be a list of tables, each under [[faults.planned]], not a table",
    ),
    (
        "[run]",
        "run.name = 1\n[rum]",
        'job.toml:1: run.name: must be text in quotes, not 1\njob.toml:2: rum: unknown key; did you mean "run"?',
    ),
    (
        'dataset = "chain_sum"',
        "",
        'job.toml:12: task: must have exactly one of: dataset = "<reasoning-gym name>",'
        ' file = "prompts.jsonl", function = "module:function", [[task.files]]',
    ),
    (
        'dataset = "chain_sum"',
        'function = "my task"',
        "job.toml:13: task.function: must be ``module:function``,"
        ' importable from the folder of job.toml, not "my task"',
    ),
    (
        'dataset = "chain_sum"',
        'file = "a.jsonl"\nreward = "reward.py"',
        "job.toml:14: task.reward: must be"
        ' ``module:function`` that scores the answers to the file\'s prompts, not "reward.py"',
    ),
    (
        'dataset = "chain_sum"',
        'dataset = "chain_sum"\nprompt = "{question"',
        "job.toml:14: task.prompt: '{question'"
        " is not a valid format string: expected '}' before end of string; write {{ for a literal brace",
    ),
    (
        'pieces = "0123456789+= "',
        "pieces = [1]",
        "job.toml:10: model.tokenizer.pieces[0]: must be text in quotes, not 1",
    ),
    (
        'pieces = "0123456789+= "',
        "pieces = 1",
        'job.toml:10: model.tokenizer.pieces: must be text in quotes or a list, as in ["a", "b"], not 1',
    ),
    (
        "[model.tokenizer]",
        "[model]\nheads = 4\nkv_heads = 3\n[model.tokenizer]",
        "job.toml:11: model.kv_heads: 3 does not divide heads = 4; use a divisor",
    ),
    (
        "[task]",
        "[sampling]\nmax_new_tokens = 64\n[task]",
        "job.toml:13: sampling.max_new_tokens: 64 leaves no space"
        " for a prompt in [model] max_length = 64; lower it or raise max_length",
    ),
    (
        "[task]",
        "[sampling]\nprompts_per_step = 64\ngroup_size = 64\nmax_new_tokens = 8000\n[model]\nmax_length = 9000\n[task]",
        "job.toml:13: sampling.prompts_per_step: 64 groups of 64 answers of 8000 tokens make a batch of up"
        " to 254 MiB; the limit is 224 MiB; write stream = true, or lower prompts_per_step, group_size or"
        " max_new_tokens",
    ),
    (
        "[task]",
        "[sampling]\nstream = true\ngroup_size = 4096\nmax_new_tokens = 8000\n[model]\nmax_length = 9000\n[task]",
        "job.toml:14: sampling.group_size: a group of 4096 answers of 8000 tokens is a message of up to 254 MiB; the limit"
        " is 224 MiB; lower group_size or max_new_tokens",
    ),
    (
        "[task]",
        '[slurm]\n"--account" = "x"\n[task]',
        "job.toml:12: slurm: '--account' is not an sbatch option; write its long name without leading dashes",
    ),
    (
        "[task]",
        '[slurm]\naccount = "x\\ny"\n[task]',
        "job.toml:12: slurm: the value of account must be printable and on one line",
    ),
    (
        "[task]",
        "[slurm]\naccount = [1]\n[task]",
        "job.toml:13: slurm.account: must be text in quotes or a whole number or true or false, not a list",
    ),
    (
        "[task]",
        '[phases.trian]\nlongest = "8h"\n[task]',
        "job.toml:12: phases.trian: is not a phase of rrl; did"
        ' you mean "train"? a phase of your own needs the keys `progresses` and `longest`',
    ),
    (
        "[task]",
        '[phases.evaluate]\nlongest = "8h"\n[task]',
        "job.toml:12: phases.evaluate: is not a phase of rrl;"
        " a phase of your own needs the keys `progresses` and `longest`",
    ),
    (
        "[task]",
        '[phases.train]\nlongst = "8h"\n[task]',
        'job.toml:13: phases.train.longst: unknown key; did you mean "longest"?',
    ),
    (
        "[task]",
        "[phases.train]\nlongest = 8\n[task]",
        'job.toml:13: phases.train.longest: a duration needs a unit; write for example "8s"',
    ),
    (
        "[task]",
        '[phases.train]\nshortest = "0s"\n[task]',
        'job.toml:13: phases.train.shortest: must be more than 0, not "0s"',
    ),
    ("[task]", "[phases]\ntrain = 3\n[task]", "job.toml:13: phases.train: must be a table, not 3"),
    ("[task]", "[phases.train]\n[task]", "job.toml:12: phases.train: is empty; set `shortest`, `longest` or both"),
    (
        "[task]",
        '[phases.train]\nlongest = "5min"\n[task]',
        'job.toml:13: phases.train.longest: shortest = "10min" is more than longest = "5min"; set both',
    ),
    (
        "[task]",
        '[phases.serve]\nlongest = "5min"\n[task]',
        "job.toml:13: phases.serve.longest: this phase has no time limit; remove this key",
    ),
    (
        "[task]",
        '[phases.train]\nlongest = "9h"\nprogresses = true\n[task]',
        "job.toml:14: phases.train.progresses: is"
        " fixed for a phase of rrl; remove this key, or name a phase of your own",
    ),
    (
        "[task]",
        '[phases.ask]\nlongest = "9h"\nprogresses = false\nwaits_for = "judge"\n[task]',
        'job.toml:15: phases.ask.waits_for: no role "judge"; there are trajectories, reward, trainer, rollout',
    ),
    (
        "[task]",
        '[phases.ask]\nlongest = "9h"\nprogresses = true\nwaits_for = "reward"\n[task]',
        "job.toml:14: phases.ask.progresses: must be false if waits_for is set: a waiting role makes no progress",
    ),
    (
        "[task]",
        '[phases."a\\nb"]\nlongest = "9h"\nprogresses = true\n[task]',
        "job.toml:12: phases: 'a\\nb' is not a valid phase name; use up to 60 printable characters",
    ),
    ("steps = 10", 'shortest = "8h"', "job.toml:3: run.shortest: unknown key; it belongs in [phases.NAME]"),
    # how old tokens may be
    (
        "[task]",
        '[sampling]\nstaleness = "unlimited"\nlate = "wait"\n[task]',
        "job.toml:14: sampling.late: has no"
        ' effect with staleness = "unlimited"; remove this key, or set staleness to a number',
    ),
    (
        "[task]",
        "[sampling]\nstaleness = -1\n[task]",
        'job.toml:13: sampling.staleness: must be at least 0 or "unlimited", not -1',
    ),
    (
        "[task]",
        "[sampling]\nstaleness = 0\nahead = 2\n[task]",
        "job.toml:14: sampling.ahead: has no effect with staleness"
        " = 0, which lets no rollout work ahead; remove this key, or raise staleness",
    ),
    (
        "[task]",
        "[sampling]\nrefill = true\ngroup_size = 1\n[task]",
        "job.toml:13: sampling.refill: would drop every group, because the only answer of a group is compared with none;"
        " raise group_size, or remove this key",
    ),
    (
        "[task]",
        "[sampling]\nrefill_limit = 2\n[task]",
        "job.toml:13: sampling.refill_limit: has no effect without refill = true; remove this key, or add that",
    ),
    ("[task]", "[sampling]\nwindow = 0\n[task]", "job.toml:13: sampling.window: must be at least 1, not 0"),
    (
        "[task]",
        '[sampling.extras]\nexperts = { per_token = "8B" }\n[task]',
        'job.toml:13: sampling.extras.experts: [roles.rollout] engine = "torch" makes none; remove this table, or set an'
        " engine or a command of your own that makes it",
    ),
    (
        "[roles.rollout]",
        '[sampling]\nextras.routed_experts.per_token = "8B"\nextras.image.per_trajectory = "1KiB"\n[roles.rollout]\n'
        'engine = "vllm"',
        'job.toml:18: sampling.extras.image: [roles.rollout] engine = "vllm" makes only routed_experts; remove this table,'
        " or set an engine or a command of your own that makes it",
    ),
    (
        "[task]",
        '[sampling.extras]\nexperts = { per_token = "8B", per_trajectory = "1KiB" }\n[task]',
        'job.toml:13: sampling.extras.experts: must have exactly one of: per_token = "384B", per_trajectory = "1MiB"',
    ),
    (
        "[task]",
        '[sampling.extras]\n"top-k" = { per_token = "8B" }\n[task]',
        "job.toml:12: sampling.extras: 'top-k' is not a valid name of an extra; use a letter, then up to 29 lower-case"
        " letters, digits and _",
    ),
    (
        "[task]",
        '[sampling.extras]\nexperts = { per_token = "0B" }\n[task]',
        'job.toml:13: sampling.extras.experts.per_token: must be at least 1, not "0B"',
    ),
    (
        "[task]",
        '[sampling.extras]\nexperts = { per_token = "1.5B" }\n[task]',
        'job.toml:13: sampling.extras.experts.per_token: \'1.5B\' is not a size; write for example "16GiB" or "512MiB"',
    ),
    (
        "[roles.rollout]",
        '[sampling.extras]\nimage = { per_trajectory = "33MiB" }\n[roles.rollout]\ncommand = ["mine"]',
        "job.toml:17: sampling.extras.image.per_trajectory: is more than 32MiB, which fit into a message to the store;"
        " lower it",
    ),
    (
        "[roles.rollout]",
        '[sampling]\nextras = { experts = { per_token = "1MiB" } }\n[roles.rollout]\ncommand = ["mine"]',
        "job.toml:16: sampling.extras_limit: 256 answers of 5 tokens have extras of up to 1280 MiB in a step, more than"
        " 1GiB; raise it if the store's node has the memory (rrl check then says how much), or lower prompts_per_step,"
        " group_size or max_new_tokens",
    ),
    (
        "[roles.rollout]",
        '[sampling]\nextras = { experts = { per_token = "200KiB" } }\n[roles.rollout]\ncommand = ["mine"]',
        "job.toml:16: sampling.prompts_per_step: 16 groups of 16 answers of 5 tokens with their extras make a batch of up"
        " to 251 MiB; the limit is 224 MiB; write stream = true, or lower prompts_per_step, group_size or"
        " max_new_tokens",
    ),
    ("[task]", '[sampling]\nstream = "yes"\n[task]', 'job.toml:13: sampling.stream: must be true or false, not "yes"'),
    (
        "[task]",
        '[track]\nto = ["tensorboard", "tensorboard"]\n[task]',
        'job.toml:13: track.to: "tensorboard" is there twice; name each tracker once',
    ),
    (
        "[task]",
        '[track]\nproject = "digits"\n[task]',
        'job.toml:13: track.project: has no effect without trackers; write for example to = ["tensorboard"]',
    ),
    (
        "[task]",
        '[track]\nto = ["comet"]\n[task]',
        'job.toml:13: track.to[0]: must be "tensorboard", "wandb" or "mlflow", not "comet"',
    ),
    (
        "[task]",
        '[sampling]\nlate = "never"\n[task]',
        'job.toml:13: sampling.late: must be "wait" or "drop", not "never"',
    ),
    # forms of allocations
    (
        "[cluster]",
        '[cluster]\nform = "hetjob"',
        'job.toml:6: cluster.form: "hetjob" needs kind = "slurm"; set `kind`, or remove this key',
    ),
    (
        'kind = "local"',
        'kind = "slurm"\nform = "replica"\nspares = 2',
        "job.toml:8: cluster.spares: form ="
        ' "replica" has no spares: it requests a new node for each lost one; remove this key',
    ),
    (
        'kind = "local"',
        'kind = "slurm"\nform = "hetjob"',
        "job.toml:7: cluster.form: the components shared, trainer"
        " would have one node each: Slurm kills them when a node of another component fails (measured); write form ="
        ' "replica", or consent with one_node_components = true',
    ),
    (
        "replicas = 2",
        'replicas = 2\nwalltime = "1h"',
        'job.toml:18: roles.rollout.walltime: form = "pool" has one'
        ' allocation for all roles; write it under [slurm] or [cluster], or set [cluster] form = "replica"',
    ),
    (
        'kind = "local"\n',
        'kind = "slurm"\nform = "replica"\nwalltime = "1h"\n[roles.trainer]\nwalltime = "2h"\n[cluster.node]\n#',
        'job.toml:10: roles.trainer.walltime: "2h" is more than [cluster] walltime = "1h"; lower it or raise'
        " the walltime of the run",
    ),
    (
        "[cluster]",
        '[manager]\nwhere = "pool"\n[cluster]\njob_walltime = "1h"',
        "job.toml:8: cluster.job_walltime: a"
        " manager that runs in the pool ends with the pool's first job;"
        ' write where = "job" in [manager], or remove this key',
    ),
    (
        "[task]",
        '[manager]\nwhere = "pol"\n[task]',
        'job.toml:13: manager.where: must be "job" or "pool", not "pol"; did you mean "pool"?',
    ),
    # gangs
    ("[task]", "[roles.trainer]\nranks = 0\n[task]", "job.toml:13: roles.trainer.ranks: must be at least 1, not 0"),
    (
        "[task]",
        "[roles.trainer]\nreplicas = 4\n[task]",
        "job.toml:13: roles.trainer.replicas: a run has one trainer; for 4 processes of it write ranks = 4",
    ),
    (
        "[task]",
        "[roles.trainer]\nranks = 2\nranks_per_node = 4\n[task]",
        "job.toml:14: roles.trainer.ranks_per_node: 4 is more than ranks = 2; lower it or raise ranks",
    ),
    (
        "[task]",
        "[roles.trainer]\nranks = 8\nranks_per_node = 8\n[task]",
        "job.toml:12: roles.trainer.cpus: 8 ranks"
        " on a node need 8, which is more than a node has ([cluster.node] cpus = 4); lower it, lower ranks_per_node"
        " or raise cpus of the node",
    ),
    (
        "[task]",
        '[roles.trainer]\nranks = 4\nranks_per_node = 2\nmem = "3GiB"\n[task]',
        "job.toml:15:"
        ' roles.trainer.mem: 2 ranks on a node need "6144MiB", which is more than a node has ([cluster.node] mem ='
        ' "4096MiB"); lower it, lower ranks_per_node or raise mem of the node',
    ),
    (
        "[task]",
        '[roles.trainer]\ncommand = ["x"]\nranks = 2\nenv = { MASTER_PORT = "29500" }\n[task]',
        "job.toml:15: roles.trainer.env.MASTER_PORT: rrl.join() sets this variable for each incarnation of a replica;"
        " remove it",
    ),
    (
        "[task]",
        '[commands.x]\ncommand = ["x"]\nenv = { MASTER_PORT = "29500" }\n[task]',
        "job.toml:14: commands.x.env.MASTER_PORT: rrl.join() sets this variable for each incarnation of a replica;"
        " remove it",
    ),
    (
        "[task]",
        '[env]\npassed = ["HF_HOME", "RANK"]\n[task]',
        'job.toml:13: env.passed[1]: "RANK": rrl.join() sets this variable for each incarnation of a replica; remove it',
    ),
    (
        "[task]",
        "[roles.trajectories]\nranks = 2\n[task]",
        "job.toml:13: roles.trajectories.ranks: the store is one process; remove this key",
    ),
    (
        "replicas = 2",
        "ranks = 2",
        "job.toml:17: roles.rollout.ranks: the built-in rollout is one process; write"
        " replicas = ..., or set a command that supports ranks",
    ),
    (
        "[task]",
        "[roles.reward]\nranks = 2\n[task]",
        "job.toml:13: roles.reward.ranks: the built-in reward is one"
        " process; write replicas = ..., or set a command that supports ranks",
    ),
    (
        "[task]",
        '[commands.judge]\ncommand = ["x"]\nranks = 2\nwatch = "activity"\n[task]',
        "job.toml:14:"
        ' commands.judge.ranks: a process learns its rank only through rrl.join(); write watch = "api", or replicas ='
        " ...",
    ),
    (
        "rollout/0",
        "trainer/0.1",
        'job.toml:22: faults.planned[0].target: no rank "trainer/0.1"; trainer/0 is one process',
    ),
    # the place
    (
        "replicas = 2",
        'launcher = "apptainer"',
        'job.toml:17: roles.rollout.launcher: "apptainer" needs an image; set [container] image',
    ),
    (
        "[task]",
        '[container]\nmounts = ["data"]\n[task]',
        "job.toml:13: container.mounts: 'data' is not a mount;"
        ' write "/source", "/source:/target" or "/source:/target:ro"',
    ),
    (
        "[task]",
        '[transport]\nnetwork = "10.4.0.0/99"\n[task]',
        "job.toml:13: transport.network: '10.4.0.0/99' is"
        ' neither an interface nor a network; write for example "ib0" or "10.4.0.0/16"',
    ),
    (
        "[task]",
        '[env]\npassed = ["A B"]\n[task]',
        "job.toml:13: env.passed: 'A B' is not a valid environment"
        ' variable name; write for example "WANDB_API_KEY" or "NCCL_*"',
    ),
    (
        "[task]",
        '[env]\nsetup = ["a\\nb"]\n[task]',
        'job.toml:13: env.setup: each entry must be one line of bash, for example "source /opt/site/profile.sh"',
    ),
    (
        "[task]",
        '[env]\nprobe = ["a-b"]\n[task]',
        "job.toml:13: env.probe: 'a-b' is not a valid Python module name; write for example \"torch\"",
    ),
    # roles of one's own
    (
        "[task]",
        "[commands.judge]\n[task]",
        "job.toml:12: commands.judge.command: missing; add command = ... in"
        " [commands.judge] (the program and its arguments; relative paths start at the folder of job.toml)",
    ),
    (
        "[task]",
        '[commands.trainer]\ncommand = ["x"]\n[task]',
        "job.toml:12: commands: 'trainer' is reserved by rrl; choose another name for your role",
    ),
    (
        "[task]",
        '[commands.standby]\ncommand = ["x"]\n[task]',
        "job.toml:12: commands: 'standby' is reserved by rrl; choose another name for your role",
    ),
    (
        "[task]",
        '[commands.Judge]\ncommand = ["x"]\n[task]',
        "job.toml:12: commands: 'Judge' is not a valid role name; use a letter, then up to 29 lower-case"
        " letters and digits",
    ),
    # not TOML
    (
        "steps = 10",
        "steps = ten",
        'job.toml:3:9: not valid TOML: invalid value: strings need quotes ("..."), booleans are true or false',
    ),
    (
        "steps = 10",
        "steps = 10\nsteps = 11",
        "job.toml:4:11: not valid TOML: this key already has a value; write it once",
    ),
    ("steps = 10", "steps 10", "job.toml:3:7: not valid TOML: expected '=' after a key in a key/value pair"),
    ('"small"', '"small', "job.toml:2:14: not valid TOML: the closing quote of this text is missing"),
    ("[cluster]", "[run]", "job.toml:5:5: not valid TOML: table [run] is defined twice"),
    (
        "cpus = 4,",
        "cpus = 4,\n",
        "job.toml:7:19: not valid TOML: expected a key; an inline table {...} must be on one line",
    ),
    (
        'at = "step=5"\n',
        "at = [",
        'job.toml:23: not valid TOML: invalid value: strings need quotes ("..."),'
        " booleans are true or false, up to the end of the file",
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\nfunction = "m:f"\n[roles.rollout]',
        "job.toml:9: model.tokenizer.chat: missing; agents hold conversations: write a piece of text for each role, for"
        ' example chat = { user = "{content}=", assistant = "{content}" }',
    ),
    (
        "[roles.rollout]",
        "[roles.agents]\n[roles.rollout]",
        'job.toml:16: roles.agents: needs function = "module:function" or command = ["program", "argument", ...]',
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\nfunction = "m:f"\ncommand = ["python", "m.py"]\n[roles.rollout]',
        "job.toml:18: roles.agents.command: an agent is a function or a command; remove this key, or remove function",
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\nfunction = "m:f"\nper = "replica"\n[roles.rollout]',
        "job.toml:18: roles.agents.per: has no effect without command; remove this key, or set command",
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\ncommand = ["a"]\nper = "replica"\nfailed_reward = 0\n[roles.rollout]',
        'job.toml:19: roles.agents.failed_reward: has no effect with per = "replica"; remove this key, and let the program'
        " finish such an episode",
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\nfunction = "m:f"\nfailed_reward = nan\n[roles.rollout]',
        "job.toml:18: roles.agents.failed_reward: is nan; write a finite number",
    ),
    (
        "[roles.rollout]",
        '[roles.agents]\nfunction = "m:f"\non_death = "reply"\n[roles.rollout]',
        'job.toml:18: roles.agents.on_death: must be "replay", "again" or "drop", not "reply"; did you mean "replay"?',
    ),
    (
        '[model.tokenizer]\npieces = "0123456789+= "\n',
        '[model]\npath = "m"\n[roles.agents]\nfunction = "m:f"\n',
        "job.toml:9: model.chat: agents hold conversations, which need a chat template; write chat = true",
    ),
    (
        "[roles.rollout]",
        "[roles.endpoint]\n[roles.rollout]",
        "job.toml:9: model.tokenizer.chat: missing; agents hold conversations: write a piece of text for each role, for"
        ' example chat = { user = "{content}=", assistant = "{content}" }',
    ),
    (
        "[roles.rollout]",
        '[roles.endpoint]\nforeign = "contxt"\n[roles.rollout]',
        'job.toml:17: roles.endpoint.foreign: must be "refuse", "context" or "override", not "contxt"; did you mean "context"?',
    ),
    (
        "[roles.rollout]",
        "[roles.endpoint]\nport = 65536\n[roles.rollout]",
        "job.toml:17: roles.endpoint.port: must be at most 65535, not 65536",
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "{content}" }\n[roles.endpoint]\nport = 80\nreplicas = 2\n',
        "job.toml:13: roles.endpoint.port: 2 replicas may share a machine, where only one of them can listen on"
        " port 80; write port = 0, or replicas = 1",
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "{content}" }\n[roles.agents]\nfunction = "m:f"\n'
        "[roles.endpoint]\nretries = 0\n",
        "job.toml:15: roles.endpoint.retries: has no effect beside [roles.agents]; remove"
        " this key, or set retries in [roles.agents]",
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "{content}" }\n[roles.endpoint]\nreplicas = 0\n',
        "job.toml:13: roles.endpoint.replicas: 0 leaves no endpoint for agents; write 1 or more, or set [roles.agents]",
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "{content}" }\n[roles.agents]\nfunction = "m:f"\n'
        "[roles.endpoint]\nreplicas = 0\nport = 80\n",
        "job.toml:16: roles.endpoint.port: has no effect with replicas = 0; remove this key, or write replicas = 1",
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "{content}" }\n[roles.agents]\nfunction = "m:f"\n'
        '[roles.endpoint]\nreplicas = 0\nconstraints = "enforce"\n',
        'job.toml:16: roles.endpoint.constraints: an engine needs the tokenizer of a folder to enforce; write "ask"',
    ),
    (
        'pieces = "0123456789+= "\n',
        'pieces = "01"\nchat = { user = "hello" }\n',
        "job.toml:11:"
        " model.tokenizer.chat: the template of 'user' is 'hello'; it must contain {content} once, for example \"{content}=\"",
    ),
]


@pytest.mark.parametrize(
    ("header", "old_key", "value", "new_key"),
    [
        ("limits", "beat", '"1s"', "heartbeat"),
        ("recovery", "adopt", '"10s"', "promote"),
        ("recovery", "whole", "2", "full_restarts"),
    ],
)
def test_renamed_key_is_reported_with_its_new_name(
    tmp_path: Path, header: str, old_key: str, value: str, new_key: str
) -> None:
    text = JOB.replace("[task]", f"[{header}]\n{old_key} = {value}\n[task]", 1)
    line = text.splitlines().index(f"{old_key} = {value}") + 1
    assert error_text(tmp_path, text) == f'job.toml:{line}: {header}.{old_key}: was renamed; write "{new_key}" instead'
    (tmp_path / "job.toml").write_text(text.replace(old_key, new_key, 1))
    load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("header", "key", "replacement"),
    [
        ("roles.rollout", "warm", 'spare = ["rollout", "train"] in [tags]: spare nodes then generate'),
        ("roles.trainer", "standbys", 'rollout = ["train"] in [tags], or [] for none'),
        ("roles.trainer", "donor_rollouts", 'rollout = ["train"] in [tags], or [] for none'),
        ("roles.trainer", "micro_batch", "micro_batch_tokens, which counts tokens, not trajectories"),
        (
            "recovery",
            "failure_rate",
            'rollout = ["train"] in [tags]: the trainer has standbys on as many nodes as its own',
        ),
    ],
)
def test_key_that_is_gone_is_reported_with_what_replaces_it(
    tmp_path: Path, header: str, key: str, replacement: str
) -> None:
    text = f"[{header}]\n{key} = 1\n" + JOB.replace("[roles.rollout]\n", "[commands.x]\n")
    complaint = error_text(tmp_path, text).splitlines()[0]
    assert complaint == f"job.toml:2: {header}.{key}: was replaced by {replacement}"


@pytest.mark.parametrize(("old", "new", "expected"), WRONG)
def test_mistake_is_reported_with_file_line_key_and_correction(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in JOB
    assert error_text(tmp_path, JOB.replace(old, new, 1)) == expected


_ROLLOUTS = "job.toml:18: roles.rollout"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "vllm = { stream_interval = 8 }",
            ".vllm.stream_interval: cannot be set: tokens that vLLM holds back would be"
            " attributed to the next weight version; remove this key",
        ),
        (
            "vllm.speculative_config.method = 'ngram'",
            ".vllm.speculative_config: cannot be set: a draft model would get no new weights; remove this key",
        ),
        (
            "vllm = { logprobs_mode = 'raw_logprobs' }",
            ".vllm.logprobs_mode: cannot be set: the trainer needs the"
            " log-probabilities of the distribution that was sampled; remove this key",
        ),
        (
            "vllm = { tensor_parallel_size = 0 }",
            ".vllm.tensor_parallel_size: must be a whole number, 1 or more: the GPUs that share the model",
        ),
        (
            "vllm = { tensor_parallel_size = true }",
            ".vllm.tensor_parallel_size: must be a whole number, 1 or more: the GPUs that share the model",
        ),
        (
            "gpus = 4",
            ".gpus: vLLM would compute on 1 of the GPUs of each replica, but gpus = 4; make"
            " tensor_parallel_size and gpus the same number",
        ),
        (
            "vllm = { tensor_parallel_size = 8 }\ngpus = 4",
            ".vllm.tensor_parallel_size: vLLM would compute on 8 of the GPUs"
            " of each replica, but gpus = 4; make tensor_parallel_size and gpus the same number",
        ),
        ("vllm = { tensor_parallel_size = 4 }\ngpus = 4", ""),
        ("vllm = { tensor_parallel_size = 2, gpu_memory_utilization = 0.5 }", ""),
        ("command = ['mine']\nvllm = { stream_interval = 8 }", ""),
    ],
)
def test_vllm_arguments_that_break_recording_or_leave_gpus_idle_are_refused(
    tmp_path: Path, written: str, expected: str
) -> None:
    text = JOB.replace("cpus = 4", "gpus = 8, cpus = 4").replace("replicas = 2", f'engine = "vllm"\n{written}')
    if expected:
        assert error_text(tmp_path, text) == f"{_ROLLOUTS}{expected}"
    else:
        (tmp_path / "job.toml").write_text(text)
        load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "replicas = 2",
            "vllm = { max_num_seqs = 8 }",
            "job.toml:17: roles.rollout.vllm: has no effect with engine"
            ' = "torch"; remove this key, or write engine = "vllm"',
        ),
        (
            "replicas = 2",
            "engine = 'mine:Engine'\nvllm = { max_num_seqs = 8 }",
            "job.toml:18: roles.rollout.vllm: has no effect with an engine of your own; remove this key",
        ),
        (
            "replicas = 2",
            'engine = "sglang"',
            'job.toml:17: roles.rollout.engine: "sglang" is no engine of rrl; write "torch", "vllm", or'
            ' "module:function" of your own',
        ),
        (
            "[roles.rollout]",
            '[roles.trainer]\nloss = "ppo"\n[roles.rollout]',
            'job.toml:17: roles.trainer.loss: "ppo" is no loss of rrl; write "grpo", "cispo", "gspo", or'
            ' "module:function" of your own',
        ),
        (
            "replicas = 2",
            "gpus = 2",
            'job.toml:17: roles.rollout.gpus: engine = "torch" computes on one GPU; write gpus = 1'
            ' and more replicas, or engine = "vllm"',
        ),
        (
            "[roles.rollout]",
            "[roles.trainer]\nranks = 2\ngpus = 4\n[roles.rollout]",
            "job.toml:18: roles.trainer.gpus:"
            " each rank of the built-in trainer computes on one GPU; write gpus = 1, and ranks = 8 for as many GPUs",
        ),
    ],
)
def test_gpus_that_no_process_would_use_are_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    text = JOB.replace("cpus = 4", "gpus = 8, cpus = 4")
    assert error_text(tmp_path, text.replace(old, new)) == expected


def test_several_mistakes_are_reported_at_once_in_file_order(tmp_path: Path) -> None:
    text = JOB.replace("steps = 10", "step = 10").replace("cpus = 4", "cpus = 0").replace('"kill"', '"kil"')
    assert [line.split(": ")[:2] for line in error_text(tmp_path, text).splitlines()] == [
        ["job.toml:3", "run.step"],
        ["job.toml:7", "cluster.node.cpus"],
        ["job.toml:21", "faults.planned[0].kind"],
    ]


def test_empty_file_is_reported_with_the_missing_tables(tmp_path: Path) -> None:
    assert error_text(tmp_path, "") == "job.toml: run: missing; add a table [run] with name"


NOTHING = '[run]\nname = "x"\n'
OWN = '[commands.judge]\ncommand = ["./judge"]\n'
TASK = '[task]\ndataset = "chain_sum"\n'
UNFIT: list[tuple[str, str]] = [
    (
        NOTHING,
        "job.toml:1: run: has nothing to do: add a [task] for the trainer and the rollouts, or a [commands.NAME]",
    ),
    (NOTHING + TASK, "job.toml:1: run.steps: missing; add steps = ... in [run] (optimizer steps of a complete run)"),
    (
        NOTHING + OWN + "[roles.rollout]\nreplicas = 2\n",
        "job.toml:5: roles.rollout: needs a [task]; a role of your own goes under [commands.NAME]",
    ),
    (
        NOTHING + OWN + "service = true\n",
        "job.toml:3: commands: are all services: the run would never end; set service = false for one",
    ),
    (
        NOTHING + "steps = 3\n" + OWN,
        "job.toml:3: run.steps: counts the trainer's steps, but there is no [task]; remove this key",
    ),
]


@pytest.mark.parametrize(("text", "expected"), UNFIT)
def test_job_without_any_role_to_run_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert error_text(tmp_path, text) == expected


def test_gang_is_accepted_only_for_the_trainer_and_for_programs_that_know_ranks(tmp_path: Path) -> None:
    gangs = (
        "[roles.trainer]\nranks = 3\nranks_per_node = 2\n",
        '[roles.reward]\nranks = 2\ncommand = ["x"]\n',
        '[commands.judge]\ncommand = ["x"]\nranks = 2\n',
    )
    text = JOB.replace("replicas = 2", 'replicas = 2\nranks = 2\ncommand = ["x"]').replace("rollout/0", "trainer/0.2")
    (tmp_path / "job.toml").write_text(text + "".join(gangs))
    view = resolve(load_job(tmp_path / "job.toml"), "python")
    assert {role.name: role.ranks for role in view.roles} == {
        "trajectories": 1,
        "reward": 2,
        "trainer": 3,
        "rollout": 2,
        "judge": 2,
    }


def test_a_role_that_shares_its_node_has_no_allocation_of_its_own(tmp_path: Path) -> None:
    text = JOB.replace('"local"', '"slurm"\nform = "replica"').replace(
        "[task]", '[roles.reward]\nslurm.account = "x"\n[task]'
    )
    assert error_text(tmp_path, text) == (
        "job.toml:14: roles.reward.slurm: this role shares its nodes with others; remove this key, or set exclusive = true for the role"
    )


def test_job_may_consist_of_an_own_role_only(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(NOTHING + OWN)
    view = resolve(load_job(tmp_path / "job.toml"), "python")
    assert [(role.name, role.kind, role.argv, role.service) for role in view.roles] == [
        ("judge", "command", ("./judge",), False)
    ]
    assert view.steps == 0


def test_file_that_is_not_text_is_refused_with_the_line(tmp_path: Path) -> None:
    assert error_text(tmp_path, b"[run]\nname = '\xff'") == "job.toml:2: byte 0xff is not UTF-8; save the file as UTF-8"


def test_control_characters_of_a_file_never_reach_the_terminal(tmp_path: Path) -> None:
    lines = error_text(tmp_path, JOB.replace("steps = 10", 'steps = 10\n"\\u001b[31m" = "\\u009b"'))
    assert lines.isprintable()


def test_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    lines = []
    for path in (tmp_path / "missing.toml", tmp_path / "there", tmp_path / "loop", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(SpecError) as raised:
            load_job(path)
        lines.append(str(raised.value).replace(f"{tmp_path}/", ""))
    assert lines == [
        "missing.toml: no such file",
        'there: is a folder; name the file in it, for example "there/job.toml"',
        "loop: cannot be read: Too many levels of symbolic links",
        "/dev/zero: is larger than 1 MiB; that is not a job.toml",
        "a\\x00b: cannot be read: embedded null byte",
    ]


def test_a_file_without_permission_is_one_line() -> None:
    def read() -> None:
        with pytest.raises(SpecError, match=r"job\.toml: cannot be read: Permission denied$"):
            load_job(path)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(JOB)
        path.chmod(0)
        if os.getuid() != 0:
            read()
        else:  # root can read every file, so the job is loaded as another user
            Path(folder).chmod(0o755)
            call_as("nobody", read, os.environ, Path("/"), timeout_s=60)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 2000,
        "[" + "a." * 3000 + "a]",
        "a." * 3000 + "a = 1",
        "x = " + "[" * 60 + "]" * 60,
        "x = " + "9" * 5000,
        "x = 1e99999",
        "x = 0000-99-99",
        'x = "\\ud800"',
        "\0",
        "=",
        "[[a]]\n[a]",
        "\r",
        '[task]\nargs = { "\\u0000" = 1 }',
        '[slurm]\n"" = 1',
        '"" = 1',
        '[[""]]',
        "[run]\n" * 2,
    ],
)
def test_hostile_text_is_refused_without_a_traceback(tmp_path: Path, text: str) -> None:
    lines = error_text(tmp_path, text)
    assert all(line.startswith("job.toml") and len(line) < 1500 for line in lines.splitlines())


_PIECES = st.one_of(
    st.sampled_from([*" \n\t\r\"'[]{}=.,#\\0123456789-+_eE:TZ\x00\x1b\u2028é", "[[", "]]", '"""', "'''", "inf"]),
    st.sampled_from(JOB.splitlines(keepends=True)),
    st.sampled_from(["true", "1.5", '"x"', "[]", "{}", "[1, [2]]", "{a = 1}", "1979-05-27", "-1", '"90s"', "9" * 30]),
    st.text(max_size=5),
)


@examples(100, many=2000)
@given(st.data())
def test_any_mutation_of_a_valid_file_gives_a_job_or_error_lines(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = JOB
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(_PIECES) + text[end:]
    path = tmp_path_factory.getbasetemp() / "mutated.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        lines = json.dumps(resolved(load_job(path)), allow_nan=False)
    except SpecError as error:
        lines = str(error)
    assert all(line.isprintable() for line in lines.split("\n"))


@examples(300, many=2000)
@given(st.binary(max_size=200))
def test_random_bytes_give_an_error_without_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.toml"
    path.write_bytes(data)
    with pytest.raises(SpecError):
        load_job(path)
