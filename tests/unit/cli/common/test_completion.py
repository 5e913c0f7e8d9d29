"""Completion of command lines: the words that typer's scripts get, and bash with such a script on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.core.faults import FaultKind
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.tests.support.cli.status_scenes import pools
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.cli.terminal import Terminal
from rrl.tests.support.cli.waiting import eventually

ERASE_LINE = "\x15"
"""Ctrl-U."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an old and a new run. The new run had agents on two nodes."""
    root = tmp_path / "runs"
    monkeypatch.setenv(RUNS_ENV, str(root))
    old, new = (Story(name).works().written(root) for name in ("quick-1", "small-2"))
    os.utime(old.resolved, (1, 1))
    roles = tuple(
        msgspec.structs.replace(role, ranks=2) if role.name == "trainer" else role for role in job_view().roles
    )
    for run in (old, new):
        run.run_spec.write_bytes(msgspec.json.encode(msgspec.structs.replace(job_view(), roles=roles)))
    new.hardware.mkdir()
    for node in ("n2", "n1"):
        new.hardware_file(node).write_text("{}")
    return root


@pytest.fixture
def offered(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Return a function that returns what bash is offered for words of which the last is incomplete."""

    def offered(*words: str) -> list[str]:
        monkeypatch.setenv(RUNS_ENV, str(runs))
        monkeypatch.setenv(main.COMPLETE_ENV, "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("rrl", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with contextlib.suppress(SystemExit):
            main.run([])
        output = capsys.readouterr()
        assert output.err == ""
        return output.out.split()

    return offered


def test_commands_and_their_options_are_offered(offered: Callable[..., list[str]]) -> None:
    assert sorted(offered("re")) == ["relay", "report", "resize", "restart", "resume"]
    assert offered("health", "dr") == ["drain-node", "drain-requests"]
    assert offered("submit", "--s") == ["--set"]
    assert offered("cancel", "--no") == ["--no-wait"]
    assert offered("ps", "") == [], "a command of another program disturbs the line with an error"


def test_runs_are_offered_newest_first(offered: Callable[..., list[str]], tmp_path: Path) -> None:
    assert offered("status", "") == offered("report", "--clean", "") == ["small-2", "quick-1"]
    assert offered("status", "q") == ["quick-1"]
    assert offered("rm", "quick-1", "") == ["small-2", "quick-1"], "rm accepts several runs"
    assert offered("logs", "-n", "5", "") == ["small-2", "quick-1"], "the value of -n counts as the run"
    assert offered("status", "small-2", "") == []
    Story("else-3").written(tmp_path / "elsewhere")
    assert offered("--runs-dir", str(tmp_path / "elsewhere"), "status", "") == ["else-3"]


def test_replicas_nodes_and_faults_of_the_named_run_are_offered(offered: Callable[..., list[str]]) -> None:
    assert offered("restart", "small", "tr") == ["trajectories/0", "trainer/0"]
    assert offered("restart", "small", "rollout/") == ["rollout/0", "rollout/1"]
    assert offered("drain", "small-2", "") == offered("health", "report", "--node", "") == ["n1", "n2"]
    assert offered("drain", "quick-1", "") == offered("drain", "nonsense", "") == []
    assert offered("logs", "small-2", "rollout") == ["rollout", "rollout/0", "rollout/1"]
    assert set(offered("logs", "small-2", "agent")) == {"agent", "agent/n1", "agent/n2"}
    assert set(offered("inject", "small-2", "")) == {kind.value for kind in FaultKind}
    targets = offered("inject", "small-2", "kill", "--target", "trainer")
    assert targets == ["trainer", "trainer/0", "trainer/0.0", "trainer/0.1"]
    assert offered("inject", "small-2", "kill", "--target", "agent") == ["agent/n1", "agent/n2"]


def test_pools_and_the_replicas_that_exist_are_offered(offered: Callable[..., list[str]], runs: Path) -> None:
    pools().written(runs)
    assert offered("resize", "small-1120", "") == ["burst"]
    assert offered("resize", "quick-1", "") == []
    assert offered("restart", "small-1120", "burst/")[-1] == "burst/8"
    assert offered("restart", "small-1120", "rollout/")[-1] == "rollout/3"


def test_words_around_an_equals_sign_are_one_word(offered: Callable[..., list[str]]) -> None:
    assert offered("health", "report", "--format", "=", "h") == ["html"]
    assert offered("health", "report", "--format", "=") == ["table", "json", "html"]
    assert offered("resume", "--set", "run.steps", "=", "9", "q") == ["quick-1"], "= counts as the run"


def test_damaged_run_spec_offers_nothing(offered: Callable[..., list[str]], runs: Path) -> None:
    for text in (b"", b"[]", b'{"roles": 3}'):
        RunDir(runs / "small-2").run_spec.write_bytes(text)
        assert offered("restart", "small-2", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_one_of_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert f"{main.COMPLETE_ENV}=complete_{shell}" in printed
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=printed, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_runs_replicas_options_and_files(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "my job.toml").touch()
    program = tmp_path / "bin" / "rrl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom rrl.cli.main import main\nsys.exit(main())\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
    with Terminal(["bash", "--norc", "--noprofile", "-i"], environment) as terminal:

        def types(keys: str, expected: str) -> None:
            before = len(terminal.drawn)
            terminal.press(keys)
            eventually(lambda: expected in terminal.drawn[before:])

        types('eval "$(rrl completion bash)" && echo loa""ded\n', "loaded")
        types("rrl stat\t", "rrl status ")
        types("sm\t", "small-2 ")
        types(f"{ERASE_LINE}rrl restart quick-1 rew\t", "reward/0 ")
        types(f"{ERASE_LINE}rrl inject small-2 kill --tar\t", "--target ")
        types("man\t", "manager ")
        types(f"{ERASE_LINE}rrl inject small-2 cra\t", "crash ")
        types(f"{ERASE_LINE}rrl health report --format=ht\t", "--format=html ")
        types(f"{ERASE_LINE}rrl submit my\t", "my\\ job.toml ")
        types(f"{ERASE_LINE}rrl --runs-dir r\t", "runs/")
