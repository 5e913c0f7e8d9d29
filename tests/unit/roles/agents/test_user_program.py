from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rrl.core.processes import read_process
from rrl.roles.agents.user_program import ProgramFailed, program_agent
from rrl.tests.support.listening_manager import wait_until

DEADLINE_S = 60.0
"""Time limit in seconds, which only a broken build reaches."""
GIVEN = "import json, os\njson.dump(dict(os.environ), open('given.json', 'w'))\n"
"""A program that writes down its environment."""


def home_in(folder: Path) -> Callable[[str], Path]:
    return lambda key: folder / f"codex-{key}"


def run(folder: Path, source: str, item: str = "an item") -> float | None:
    """Run a Python program once as an agent, and return its reward."""
    (folder / "program.py").write_text(source)

    async def main() -> float | None:
        agent = program_agent([sys.executable, "program.py"], folder, home_in(folder))
        async with asyncio.timeout(DEADLINE_S):
            result: float | None = await agent(item, "http://b/v1", "key")
            return result

    return asyncio.run(main())


def test_program_gets_item_url_and_key_in_its_environment_and_starts_in_the_jobs_folder(tmp_path: Path) -> None:
    run(tmp_path, GIVEN, "several\nlines")
    given = json.loads((tmp_path / "given.json").read_text())
    assert {name: given[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "RRL_ITEM")} == {
        "OPENAI_BASE_URL": "http://b/v1",
        "ANTHROPIC_BASE_URL": "http://b",
        "RRL_ITEM": "several\nlines",
    }


def test_keys_of_the_users_shell_are_replaced_by_the_key_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    for name in names:
        monkeypatch.setenv(name, "real")
    run(tmp_path, GIVEN)
    given = json.loads((tmp_path / "given.json").read_text())
    assert [given[name] for name in names] == ["key"] * 4


def test_codex_gets_a_folder_with_the_address_that_is_new_in_each_attempt_and_gone_after_it(tmp_path: Path) -> None:
    home = home_in(tmp_path)("key")
    home.mkdir()
    (home / "left").touch()  # by an attempt whose process was killed
    source = (
        "import os, pathlib, shutil\nhome = pathlib.Path(os.environ['CODEX_HOME'])\n"
        "assert os.listdir(home) == ['config.toml'] and home.stat().st_mode & 0o77 == 0\n"
        "shutil.copy(home / 'config.toml', 'copied.toml')\nprint(1)"
    )
    assert run(tmp_path, source) == 1.0
    settings = tomllib.loads((tmp_path / "copied.toml").read_text())
    provider = settings["model_providers"][settings["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://b/v1", "responses")
    assert not home.exists()


def test_file_of_another_user_in_place_of_codexs_folder_fails_the_attempt_as_no_fault_of_the_agent(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    home_in(tmp_path)("key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProgramFailed, match="the folder for Codex cannot be made") as raised:
        run(tmp_path, "")
    assert raised.value.environmental
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("print('a log line')\nprint(0.25)", 0.25),
        ("print('1')\nprint()\nprint('  ')", 1.0),
        ("print('0.5 points')", None),
        ("", None),
        ("import sys\nprint(0.5)\nprint(0.75, file=sys.stderr)", 0.5),
        ("print('x' * 10**6)\nprint(-2)", -2.0),
        ('print(\'{"planner": 0.5, "*": 1}\')', {"planner": 0.5, "*": 1}),
        (
            "import json\nprint(json.dumps({f'{n:0>200}': 1.0 for n in range(64)}))",
            {f"{n:0>200}": 1.0 for n in range(64)},
        ),
        ("print('{}')", {}),
        ("print('{planner: 1}')", None),
    ],
)
def test_the_last_line_of_stdout_is_the_reward_if_it_is_a_number(tmp_path: Path, source: str, reward: object) -> None:
    assert run(tmp_path, source) == reward


@pytest.mark.parametrize(
    ("source", "why", "environmental"),
    [
        ("print(1.0)\nraise KeyError('tool')", "ended with exit code 1: KeyError: 'tool'", False),
        ("import sys\nsys.exit(3)", "ended with exit code 3", False),
        ("import os, sys\nsys.exit(os.EX_TEMPFAIL)", "ended with exit code 75", True),
        ("import os\nos.kill(os.getpid(), 9)", "ended with signal 9 (Killed)", True),
    ],
)
def test_nonzero_exit_is_a_failure_with_the_last_line_of_stderr(
    tmp_path: Path, source: str, why: str, environmental: bool
) -> None:
    with pytest.raises(ProgramFailed) as raised:
        run(tmp_path, source)
    assert str(raised.value) == f"{sys.executable} {why}"
    assert raised.value.environmental is environmental


def test_program_that_cannot_be_started_is_a_failure_that_states_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="no-such-program cannot be started: ") as raised:
        asyncio.run(program_agent(["no-such-program"], tmp_path, home_in(tmp_path))("i", "u", "k"))  # type: ignore[arg-type]
    assert not raised.value.environmental
    with pytest.raises(ProgramFailed, match=r"cannot be started: .*null byte"):
        run(tmp_path, "", "\0")


ENDLESS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids.new", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(600)
"""
"""A program with a child process. Both sleep for longer than the test waits."""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_cancelled_attempt_ends_the_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ENDLESS)
    pids = tmp_path / "pids"

    agent = program_agent([sys.executable, "program.py"], tmp_path, home_in(tmp_path))
    attempt = asyncio.ensure_future(agent("i", "u", "k"))
    async with asyncio.timeout(DEADLINE_S):
        while not pids.exists():
            await asyncio.sleep(0.01)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt

    program, child = map(int, pids.read_text().split())
    assert read_process(program) is None  # it is reaped
    wait_until(lambda: is_gone(child))


def test_child_in_a_session_of_its_own_does_not_delay_the_end_of_the_attempt(tmp_path: Path) -> None:
    source = ENDLESS.replace('600)"]', '600)"], start_new_session=True').replace("\ntime.sleep(600)", "\nprint(1.5)")
    assert run(tmp_path, source) == 1.5
    os.kill(int((tmp_path / "pids").read_text().split()[1]), 9)
