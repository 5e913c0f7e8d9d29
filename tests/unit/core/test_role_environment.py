"""The bash script that prepares the environment of ``[env]``: its text, and its effect in bash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rrl.core.role_environment import EnvSpec, prelude, select_variables, wrap

GOLDEN = """\
rrl_messages=$1 rrl_report=$2 rrl_folder=$PWD
shift 2
rrl_command=("$@")
set --  # a sourced script sees the arguments of the script that sources it
exec {rrl_stderr}>&2 2>&"$rrl_messages"
trap 'rrl_code=$?; printf "[env] %s failed (exit %s)" "$rrl_at" "$rrl_code" >&"$rrl_report"; exit "$rrl_code"' EXIT
rrl_check() { local code=$?; [ "$code" = 0 ] || exit "$code"; }
rrl_fail() { printf '%s\\n' "$1" >&2; exit 1; }
rrl_at='setup line 1'
eval 'source /opt/site/profile.sh'
rrl_check
rrl_at='setup line 2'
eval 'export WHO='"'"'me'"'"''
rrl_check
rrl_at=modules
if ! type module >/dev/null 2>&1; then
    for rrl_file in /etc/profile.d/z00_lmod.sh /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        if [ -r "$rrl_file" ]; then source "$rrl_file"; break; fi
    done
fi
type module >/dev/null 2>&1 || rrl_fail 'there is no "module" on this node; define it by a line of [env] setup, for \
example "source /opt/lmod/init/bash"'
rrl_check
rrl_at='module load cuda/12.4'
module load cuda/12.4
rrl_check
rrl_at='venv ~/venvs/rl'
[ -r "$HOME"/venvs/rl/bin/activate ] || rrl_fail 'the folder has no bin/activate on this node'
source "$HOME"/venvs/rl/bin/activate
rrl_check
rrl_at='conda rl'
case "$(type -t conda)" in
    function) ;;
    file) eval "$(conda shell.bash hook)" ;;
    *) [ -x "${CONDA_EXE:-}" ] || rrl_fail 'there is no "conda" on this node; put it into PATH by a line of [env] setup'
       eval "$("$CONDA_EXE" shell.bash hook)" ;;
esac
conda activate rl
rrl_check
rrl_at="return to $rrl_folder"
[ "$PWD" = "$rrl_folder" ] || cd "$rrl_folder"
rrl_check
trap - EXIT
if ! type -P -- "${rrl_command[0]}" >/dev/null; then
    printf 'this node has no command %s; after [env], PATH is %s' "${rrl_command[0]}" "$PATH" >&"$rrl_report"
    exit 127
fi
printf begun >&"$rrl_report"
exec 2>&"$rrl_stderr" {rrl_stderr}>&- {rrl_messages}>&- {rrl_report}>&-
exec "${rrl_command[@]}"
"""


def test_prelude_of_an_environment_equals_the_stored_text() -> None:
    env = EnvSpec(
        setup=("source /opt/site/profile.sh", "export WHO='me'"), modules=("cuda/12.4",), venv="~/venvs/rl", conda="rl"
    )
    assert prelude(env) == GOLDEN


def test_env_without_setup_has_no_prelude() -> None:
    assert prelude(EnvSpec(passed=("WANDB_API_KEY",), probe=("torch",), python="/x/python")) == ""


class PreludeResult:
    """The result of a command that starts after the prelude (the script of [env]); the script's report and stderr."""

    def __init__(self, env: EnvSpec, *command: str, home: Path = Path("/"), **variables: str) -> None:
        words, words_in = os.pipe()
        report, report_in = os.pipe()
        given = {"PATH": "/usr/bin:/bin", "HOME": str(home)} | variables
        argv: Sequence[str] = wrap(prelude(env), words_in, report_in, command or ("true",))
        kept = (words_in, report_in)
        done = subprocess.run(argv, env=given, cwd="/tmp", capture_output=True, text=True, pass_fds=kept)
        for fd in kept:
            os.close(fd)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        with open(words) as file:
            self.stderr = file.read()
        with open(report) as file:
            self.report = file.read()


def test_setup_lines_run_in_order_in_one_shell_and_set_variables_of_the_command() -> None:
    result = PreludeResult(
        EnvSpec(setup=("A=1", "export B=$((A + 1))", "cd /usr")), "sh", "-c", "echo $B $A $PWD; echo own >&2"
    )
    assert (result.report, result.out, result.err, result.stderr) == ("begun", "2 /tmp\n", "own\n", "")


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ("ls /no/such/folder", "2", "/no/such/folder"),
        ("exit 7", "7", ""),
        ("set -e; false; true", "1", ""),
        ("echo 'never closed", "2", "unexpected EOF"),
        ("no-such-command", "127", "command not found"),
        ("source /no/such/file", "1", "No such file"),
    ],
)
def test_failing_setup_line_prevents_the_command_and_is_named(line: str, code: str, word: str) -> None:
    result = PreludeResult(EnvSpec(setup=("true", line, "echo on >&2")), "echo", "started")
    assert result.report.startswith(f"[env] setup line 2 failed (exit {code})") or code == "1"
    assert result.report.startswith("[env] setup line 2 failed (exit ")
    assert word in result.stderr
    assert "on" not in result.stderr.split()
    assert result.out == ""


def test_a_sourced_script_does_not_see_the_arguments_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "setvars.sh").write_text('export SEEN="$#"\n')
    result = PreludeResult(EnvSpec(setup=(f"source {tmp_path}/setvars.sh",)), "sh", "-c", "echo $SEEN")
    assert result.out == "0\n"


def test_modules_are_loaded_by_the_sites_own_function_and_one_that_is_missing_is_named() -> None:
    module = 'module() { [ "$2" != bad ] || { echo "Unable to locate \'$2\'" >&2; return 1; }; export HAS=$HAS.$2; }'
    result = PreludeResult(EnvSpec(setup=(module,), modules=("gcc", "cuda/12")), "sh", "-c", "echo $HAS")
    assert (result.report, result.out) == ("begun", ".gcc.cuda/12\n")
    result = PreludeResult(EnvSpec(setup=(module,), modules=("gcc", "bad")))
    assert result.report == "[env] module load bad failed (exit 1)"
    assert "Unable to locate" in result.stderr


def test_node_without_environment_modules_is_reported() -> None:
    result = PreludeResult(EnvSpec(modules=("cuda",)))
    assert result.report == "[env] modules failed (exit 1)"
    assert 'there is no "module" on this node' in result.stderr


def test_a_venv_is_activated_and_one_that_is_absent_is_named(tmp_path: Path) -> None:
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/activate").write_text("export VIRTUAL_ENV=here PATH=/v:$PATH\n")
    result = PreludeResult(EnvSpec(venv="~/v"), "sh", "-c", "echo $VIRTUAL_ENV $PATH", home=tmp_path)
    assert result.out == "here /v:/usr/bin:/bin\n"
    result = PreludeResult(EnvSpec(venv=str(tmp_path / "w")))
    assert result.report == f"[env] venv {tmp_path}/w failed (exit 1)"
    assert "no bin/activate" in result.stderr


def test_conda_is_found_by_its_variable_and_its_environment_is_activated(tmp_path: Path) -> None:
    """The fake conda prints a shell function, as the real ``conda shell.bash hook`` does."""
    conda = tmp_path / "fake_conda"
    conda.write_text("#!/bin/sh\necho 'conda() { [ \"$2\" = rl ] || return 1; export CONDA_DEFAULT_ENV=$2; }'\n")
    conda.chmod(0o755)
    result = PreludeResult(EnvSpec(conda="rl"), "sh", "-c", "echo $CONDA_DEFAULT_ENV", CONDA_EXE=str(conda))
    assert (result.report, result.out) == ("begun", "rl\n")
    assert PreludeResult(EnvSpec(conda="no"), CONDA_EXE=str(conda)).report == "[env] conda no failed (exit 1)"
    assert 'there is no "conda" on this node' in PreludeResult(EnvSpec(conda="rl")).stderr


def test_missing_command_is_reported_with_the_searched_path() -> None:
    result = PreludeResult(EnvSpec(setup=("PATH=/nowhere",)), "no-such-command")
    assert result.report == "this node has no command no-such-command; after [env], PATH is /nowhere"
    assert result.code == 127


def test_variables_are_passed_by_name_or_prefix_but_never_those_of_a_launcher() -> None:
    shell = {
        "WANDB_API_KEY": "secret",
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "SYS",
        "OTHER": "x",
        "SLURM_JOB_ID": "7",
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "RRL_LAUNCH": "/x",
    }
    assert select_variables(("WANDB_API_KEY", "NCCL_*", "MISSING"), shell) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "SYS",
        "WANDB_API_KEY": "secret",
    }
    assert select_variables(("S*", "PMI*", "OMPI_*", "RRL_*", "SLURM_JOB_ID"), shell) == {}
