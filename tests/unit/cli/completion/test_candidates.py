"""The candidates for a command line, as the completion scripts request them and as bash on a terminal offers them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.completion.candidates import script
from rrl.core.faults import FaultKind
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.docs import make_completion
from rrl.tests.support.cli.story import Story, job_view

DEADLINE_S = 60.0
"""Time (s) within which bash answers even on a busy machine."""


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
def offered(runs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that returns the candidates for a command line whose last word is incomplete."""

    def offered(*words: str) -> list[str]:
        assert main.run([main.COMPLETE, *words]) == 0
        return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()]

    return offered


def test_table_of_commands_is_that_of_the_command_line() -> None:
    remedy = "run .venv/bin/python -m rrl.docs.make_completion"
    assert make_completion.TABLE.read_text() == make_completion.table(), remedy


def test_commands_and_their_options_are_offered(offered: Callable[..., list[str]]) -> None:
    assert offered("re") == ["resume", "report", "restart", "relay"]
    assert offered("health", "dr") == ["drain-node", "drain-requests"]
    assert offered("submit", "--s") == ["--set"]
    assert offered("--runs-dir", "/x", "stat") == ["status"]
    assert offered("cancel", "--no") == ["--no-wait"]
    assert offered("list", "x") == []
    assert offered("nonsense", "") == []
    assert offered("logs", "-n", "5", "") == ["small-2", "quick-1"], "the value of -n counts as the run"


def test_runs_are_offered_newest_first(offered: Callable[..., list[str]]) -> None:
    assert offered("status", "") == ["small-2", "quick-1"]
    assert offered("status", "q") == ["quick-1"]
    assert offered("rm", "quick-1", "") == ["small-2", "quick-1"], (
        "no further runs are offered, though rm takes several"
    )
    assert offered("status", "small-2", "") == []


def test_folder_of_runs_of_the_command_line_counts(
    offered: Callable[..., list[str]], tmp_path: Path, runs: Path
) -> None:
    Story("else-3").written(tmp_path / "elsewhere")
    assert offered("--runs-dir", str(tmp_path / "elsewhere"), "status", "") == ["else-3"]
    assert offered(f"--runs-dir={tmp_path / 'missing'}", "status", "") == []


def test_replicas_nodes_and_faults_of_the_named_run_are_offered(offered: Callable[..., list[str]]) -> None:
    assert offered("restart", "small", "tr") == ["trajectories/0", "trainer/0"]
    assert offered("restart", "small", "rollout/") == ["rollout/0", "rollout/1"]
    assert offered("drain", "small-2", "") == ["n1", "n2"]
    assert offered("drain", "quick-1", "") == []
    assert offered("drain", "nonsense", "") == []
    assert offered("logs", "small-2", "rollout") == ["rollout", "rollout/0", "rollout/1"]
    assert offered("logs", "small-2", "agent") == ["agent", "agent/n1", "agent/n2"]
    assert set(offered("inject", "small-2", "")) == {kind.value for kind in FaultKind}
    targets = offered("inject", "small-2", "kill", "--target", "trainer")
    assert targets == ["trainer/0", "trainer", "trainer/0.0", "trainer/0.1"]
    assert offered("inject", "small-2", "kill", "--target", "m") == ["manager"]


def test_value_behind_an_equals_sign_is_offered_whole_or_apart(offered: Callable[..., list[str]]) -> None:
    assert offered("health", "report", "--format=h") == ["html"]
    assert offered("health", "report", "--format", "=", "h") == ["html"], (
        "no candidates for the words into which bash divides --format=h"
    )
    assert offered("health", "report", "--format", "=") == ["table", "json", "html"]


def test_files_and_folders_are_left_to_the_shell(offered: Callable[..., list[str]]) -> None:
    assert offered("submit", "a") == [":file"]
    assert offered("submit", "base.toml", "more") == [":file"]
    assert offered("resume", "small-2", "--job", "") == [":file"]
    assert offered("--runs-dir", "x") == [":folder"]


def test_damaged_run_spec_offers_nothing(offered: Callable[..., list[str]], runs: Path) -> None:
    for text in (b"", b"[]", b'{"roles": 3}'):
        RunDir(runs / "small-2").run_spec.write_bytes(text)
        assert offered("restart", "small-2", "") == []


def test_completion_imports_nothing_heavy(runs: Path) -> None:
    code = (
        "import sys; from rrl.cli.main import run; assert run(['__complete', 'restart', 'small-2', '']) == 0;"
        "heavy = {'pydantic', 'typer', 'msgspec', 'rich', 'zmq', 'asyncio', 'submitit', 'torch'};"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "trainer/0\n" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_printed_and_is_one_of_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell)
    assert main.COMPLETE in printed
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=printed, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class Terminal:
    """An interactive bash on a pseudo-terminal, with this ``rrl`` and its completion loaded."""

    def __init__(self, folder: Path) -> None:
        program = folder / "bin" / "rrl"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\nimport sys\nfrom rrl.cli.main import main\nsys.exit(main())\n")
        program.chmod(0o755)
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self._output = ""
        self.types('eval "$(rrl completion bash)" && echo loa""ded\n', "loaded")

    def types(self, keys: str, expected: str) -> None:
        """Type keys, and wait until bash shows the expected text."""
        self._output = ""
        os.write(self._fd, keys.encode())
        until = time.monotonic() + DEADLINE_S
        while expected not in self._output:
            assert time.monotonic() < until, f"{expected!r} is not in {self._output!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._output += os.read(self._fd, 65536).decode(errors="replace")

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


def test_bash_completes_commands_runs_replicas_options_and_files(runs: Path, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "my job.toml").touch()
    terminal = Terminal(tmp_path)
    erase = "\x15"
    try:
        terminal.types("rrl stat\t", "rrl status ")
        terminal.types("sm\t", "small-2 ")
        terminal.types(f"{erase}rrl restart quick-1 rew\t", "reward/0 ")
        terminal.types(f"{erase}rrl inject small-2 kill --tar\t", "--target ")
        terminal.types("man\t", "manager ")
        terminal.types(f"{erase}rrl inject small-2 cra\t", "crash ")
        terminal.types(f"{erase}rrl drain small-2 n2\t", "n2 ")
        terminal.types(f"{erase}rrl health report --format=ht\t", "--format=html ")
        terminal.types(f"{erase}rrl submit my\t", "my\\ job.toml ")
        terminal.types(f"{erase}rrl --runs-dir r\t", "runs/")
    finally:
        terminal.close()
