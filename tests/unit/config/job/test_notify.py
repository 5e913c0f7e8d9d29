"""The table [notify]: its defaults, its mistakes, and that only job.toml contains its target."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rrl.config.job.load import SpecError, load_job, resolved
from rrl.config.job.render import as_toml
from rrl.config.job.resolve import resolve
from rrl.core.run_dir import RUNS_ENV
from rrl.manager.bootstrap.start import create
from rrl.tests.support.job_toml import JOB

SECRET = "s3cr3t"
HOOK = f'webhook = "https://hooks.example.org:8443/services/{SECRET}?key={SECRET}"'
COMMAND = f'command = ["./notify.sh", "--token", "{SECRET}"]'


def written(folder: Path, table: str, job: str = JOB) -> Path:
    path = folder / "job.toml"
    path.write_text(f"{job}\n[notify]\n{table}\n")
    return path


def test_job_without_the_table_sends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    job = load_job(path)
    assert job.notify is None
    assert resolve(job, "python").notify == ()


def test_every_kind_is_sent_unless_the_job_names_some(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, HOOK))
    assert resolve(job, "python").notify == ("failed", "degraded", "stalled", "completed", "drain")
    job = load_job(written(tmp_path, f'on = ["drain", "failed", "drain"]\n{HOOK}'))
    assert resolve(job, "python").notify == ("drain", "failed")


@pytest.mark.parametrize("table", [HOOK, COMMAND])
def test_job_that_is_written_again_keeps_the_target(tmp_path: Path, table: str) -> None:
    job = load_job(written(tmp_path, table))
    (tmp_path / "again.toml").write_text(as_toml(job))
    assert load_job(tmp_path / "again.toml").notify == job.notify


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        (HOOK, 'webhook = "https://hooks.example.org:8443/..."'),
        (f'webhook = "https://ada:{SECRET}@hooks.example.org"', 'webhook = "https://hooks.example.org/..."'),
        (f'webhook = "http://[::1]:80/{SECRET}"', 'webhook = "http://[::1]:80/..."'),
        (COMMAND, 'command = ["./notify.sh", "..."]'),
        ('command = ["./notify.sh"]', 'command = ["./notify.sh"]'),
    ],
)
def test_shown_job_has_no_secret(tmp_path: Path, table: str, shown: str) -> None:
    text = as_toml(load_job(written(tmp_path, table)).without_secrets())
    assert shown in text.splitlines()
    assert SECRET not in text


@pytest.mark.parametrize("table", [HOOK, COMMAND])
def test_target_is_in_no_file_of_a_run_but_job_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    path = written(tmp_path, table)
    job = load_job(path)
    run = create(job, resolve(job, "python"), path)
    holding = [file for file in run.path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert holding == [run.job_toml]
    assert SECRET not in msgspec.json.encode(resolved(job)).decode()


_TARGET = 'must have exactly one of: command = ["program", ...], webhook = "https://..."'
_WEBHOOK = 'is not the address of a webhook; write for example "https://hooks.example.org/services/..."'


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('on = ["failed"]', f"notify: {_TARGET}"),
        (f"{HOOK}\n{COMMAND}", f"notify: {_TARGET}"),
        (f"on = []\n{HOOK}", "notify.on: must be something that is not empty, not []"),
        (f"{HOOK}\nwhen = 1", "notify.when: unknown key; known here: on, command, webhook"),
        (f'webhook = "hooks.example.org/{SECRET}"', f"notify.webhook: {_WEBHOOK}"),
        (f'webhook = "ftp://hooks.example.org/{SECRET}"', f"notify.webhook: {_WEBHOOK}"),
        (f'webhook = "https://hooks.example.org:x/{SECRET}"', f"notify.webhook: {_WEBHOOK}"),
        (f'webhook = "https://hooks.example.org/{SECRET} x"', f"notify.webhook: {_WEBHOOK}"),
        ("command = []", "notify.command: must be something that is not empty, not []"),
    ],
)
def test_mistake_is_one_line_without_the_address(tmp_path: Path, table: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(written(tmp_path, table))
    (line,) = str(caught.value).splitlines()
    assert line.partition(": ")[2] == expected
    assert SECRET not in line


def test_unknown_kind_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(written(tmp_path, f'on = ["fail"]\n{HOOK}'))
    (line,) = str(caught.value).splitlines()
    assert 'must be "failed", "degraded", "stalled", "completed" or "drain", not "fail"; did you mean "failed"?' in line


def test_stall_of_a_run_without_training_is_refused(tmp_path: Path) -> None:
    commands = '[run]\nname = "small"\n[commands.solver]\ncommand = ["true"]\n'
    path = written(tmp_path, f'on = ["stalled"]\n{HOOK}', commands)
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert str(caught.value).endswith(
        'notify.on: "stalled" counts training steps, but there is no [task]; remove "stalled"'
    )
    assert load_job(written(tmp_path, HOOK, commands)).notify is not None, (
        "the default of notify.on was reported as a mistake of the user"
    )
