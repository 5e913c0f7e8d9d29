"""The generated pages of docs/ agree with the code and with the output of the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import typer.main

from rrl.cli import main
from rrl.cli.commands import app
from rrl.cli.output_schemas import EVENTS, OUTPUTS, Form, output_schema
from rrl.core.run_dir import RUNS_ENV
from rrl.docs import make_commands, make_detection, make_json, make_metrics
from rrl.manager.model import events as ev
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story
from rrl.tests.support.job_toml import JOB

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "maker", [make_commands, make_detection, make_json, make_metrics], ids=lambda one: one.__name__
)
def test_a_generated_page_is_that_of_the_code(maker: ModuleType) -> None:
    remedy = f"run .venv/bin/python -m {maker.__name__}"
    assert maker.PAGE.read_text() == maker.page(), remedy


def test_the_page_for_coding_agents_is_short_and_names_every_program_that_makes_a_file() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    makers = {path.stem for path in (ROOT / "docs").glob("make_*.py")} - {"make_release"}
    assert set(re.findall(r"rrl\.docs\.(make_\w+)", page)) == makers
    assert len(page.splitlines()) <= 70


def test_every_command_is_on_the_page_of_commands() -> None:
    page = make_commands.page()
    commands = typer.main.get_group(app).commands
    hidden = [name for name, command in commands.items() if command.hidden]
    missing = [name for name in commands if f"### `rrl {name}" not in page and name not in hidden]
    assert missing == [], "these commands are on no page: add each to a section in cli/commands/command_group.py"


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _with_json(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", {})
    if inner:
        return [found for one in inner.values() for found in _with_json(one, f"{name} {one.name}")]
    return [name] if any("--json" in parameter.opts for parameter in command.params) else []


def test_every_command_with_json_has_a_schema() -> None:
    described = {command for output in OUTPUTS.values() for command in output.commands}
    assert [name for name in _with_json(typer.main.get_group(app), "rrl") if f"{name} --json" not in described] == []


@pytest.mark.parametrize("name", [EVENTS, *OUTPUTS])
def test_a_schema_is_valid_and_defines_what_it_names(name: str) -> None:
    schema = output_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema))) <= set(schema["$defs"])


def test_each_event_and_its_fields_are_described() -> None:
    definitions = output_schema(EVENTS)["$defs"]
    assert all(definitions[event.__name__]["description"] for event in ev.Event.__args__)
    assert "hit no incarnation" in definitions["FaultInjected"]["properties"]["incarnation"]["description"]


def test_an_unknown_schema_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["schema", "stats"]) == 2
    assert "no schema is called 'stats'; there are: job, events, started," in capsys.readouterr().err


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the arguments of each command. The default argument is a run in which a rollout was replaced."""
    root, job = tmp_path / "runs", tmp_path / "job.toml"
    monkeypatch.setenv(RUNS_ENV, str(root))
    job.write_text(JOB)
    run = Story().works().recovers("rollout/0").written(root)
    return {"check": [str(job), "--no-task"], "list": [], "": [run.id]}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("status", "rrl status --json"),
        ("list", "rrl list --json"),
        ("check", "rrl check --json"),
        ("explain", "rrl explain --json"),
        ("metrics", "rrl metrics"),
        ("failures", "rrl logs --failed --json"),
        ("report", "rrl report --json"),
    ],
)
def test_an_output_fits_its_schema(
    name: str, command: str, subject: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()[1:]
    assert main.run([words[0], *subject.get(words[0], subject[""]), *words[1:]]) == 0
    text = capsys.readouterr().out
    match OUTPUTS[name].form:
        case Form.LINES:
            documents = [json.loads(line) for line in text.splitlines()]
        case Form.LIST:
            documents = json.loads(text)
        case _:
            documents = [json.loads(text)]
    assert documents
    for document in documents:
        assert_fits_its_schema(name, document)
