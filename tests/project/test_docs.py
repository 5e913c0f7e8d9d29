"""The pages name only existing commands, flags, make targets and files. The README's programs fit the worker API."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import rrl
from rrl import Run, Worker
from rrl.cli.commands import app
from rrl.config.job.schema import Job
from rrl.docs import make_picture, make_reference
from rrl.roles.trajectories.batches import Batch, Part
from rrl.roles.worker.work_items import NewWeights, WorkLease
from rrl.tests.support.cli.story import BEGAN, Story
from rrl.tests.support.runs import LIGHT, TestRun, check_sound, light_job, submit_here

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _code(page: Path) -> Iterator[str]:
    """Yield every line of code on a page: the lines of its code blocks, and each text between backticks."""
    text = page.read_text()
    for language, block in _FENCED.findall(text):
        if language != "python":
            yield from block.splitlines()
    yield from _INLINE.findall(_FENCED.sub("", text))


def _commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each call of ``program`` on a page; text after #, |, ; or an arrow is not an argument."""
    for line in _code(page):
        if match := re.match(rf"(?:\S*/)?{program} +(.*)", line.strip()):
            yield shlex.split(re.split(r"\s+[#|;─◄►]", match[1])[0])


def _meant(group: Any, arguments: list[str]) -> Any:
    """Return the command that the arguments name, which may be in a group of commands (``rrl health report``)."""
    command = group.commands[arguments[0]]
    inner = getattr(command, "commands", None)
    return command if not inner or len(arguments) == 1 else _meant(command, arguments[1:])


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_command_and_flag_that_a_page_names_exists(page: Path) -> None:
    group = typer.main.get_group(app)
    for arguments in _commands(page, "rrl"):
        flags = {option for one in group.params for option in one.opts} | {"--help"}
        if not arguments[0].startswith("-"):
            assert arguments[0] in group.commands, f"{_id(page)}: rrl {' '.join(arguments)}"
            command = _meant(group, arguments)
            flags = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        assert not [word for word in arguments if word.startswith("-") and word not in flags], f"{page}: {arguments}"


def test_every_flag_in_the_prose_of_the_readme_belongs_to_some_command() -> None:
    group = typer.main.get_group(app)
    flags = {option for one in group.commands.values() for parameter in one.params for option in parameter.opts}
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if "pip install" not in line]
    named = re.findall(r"(?<!\S)`?(--[a-z-]+)", "\n".join(lines))
    assert named
    assert set(named) <= flags | {"--help", "--version"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for arguments in _commands(page, "make"):
        assert set(arguments) <= targets, f"{_id(page)}: make {' '.join(arguments)}"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_a_block_with_a_table_of_a_toml_file_says_that_it_is_toml(page: Path) -> None:
    untagged = [block for language, block in _FENCED.findall(page.read_text()) if not language]
    assert not [block for block in untagged if re.search(r"^\[{1,2}[a-z][\w.*-]*\]{1,2} *(#.*)?$", block, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    links = [page.parent / target for target in _LINK.findall(text)]
    named = [
        ROOT / name
        for name in _INLINE.findall(_FENCED.sub("", text))
        if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", name) and name.partition("/")[0] in folders
    ]
    assert not [path for path in links + named if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_test_that_a_page_says_to_run_exists(page: Path) -> None:
    commands = [line.partition("pytest ")[2].partition("#")[0] for line in _code(page) if "pytest " in line]
    named = [word for command in commands for word in shlex.split(command) if word.startswith("tests")]
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_markdown_page_that_a_file_cites_is_in_the_repository() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "tests"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".csv", ".toml")]
    pages = {page.name for page in PAGES} | {page.name for page in (ROOT / "examples").rglob("*.md")}
    cited = [(_id(file), name) for file in [*PAGES, *files] for name in re.findall(r"[\w-]+\.md\b", file.read_text())]
    assert len(cited) > 100
    assert not [(file, name) for file, name in cited if name not in pages]


def test_every_name_of_the_glossary_is_in_the_file_that_it_names() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").split(" | ")[-1] for row in rows]
    named = [
        (name, file)
        for cell in cells
        for names, file in re.findall(r"((?:`[^`]+`,? ?)+)in `([^`]+)`", cell)
        for name in _INLINE.findall(names)
    ]
    assert len(named) > 50
    assert not [(name, file) for name, file in named if not _defines(ROOT / file, name.rpartition(".")[2])]


def _defines(file: Path, name: str) -> bool:
    return re.search(rf"^ *(?:(?:async )?def |class )?{name}\b *[(:=]", file.read_text(), re.MULTILINE) is not None


# ── the generated pages ────────────────────────────────────────────────────────────────────────────────────────────
def test_reference_of_job_toml_matches_the_code() -> None:
    assert make_reference.PAGE.read_text() == make_reference.reference(), make_reference.__doc__


def test_every_key_of_job_toml_is_explained() -> None:
    assert make_reference.undescribed() == []


def test_the_reference_has_every_table_of_job_toml() -> None:
    tables = set(re.findall(r"^## `\[+([a-z.*]+)\]+`", make_reference.reference(), re.MULTILINE))
    named = {"roles.*", "roles.trainer", "roles.rollout", "commands.*", "phases.*", "faults.planned", "faults.random"}
    assert tables >= (set(Job.model_fields) - {"roles", "commands", "phases"}) | named


def test_the_picture_shows_a_rollout_that_was_replaced(tmp_path: Path) -> None:
    story = Story().works().recovers("rollout/0")
    state = make_picture.representative_state(story.written(tmp_path))
    assert (state.replica(story.incarnation("rollout/0").replica).incarnation_number, state.at) == (2, BEGAN + story.at)
    drawn = make_picture.picture(state)
    assert "works" in drawn
    assert "http" not in drawn.replace("http://www.w3.org/", ""), "the picture loads a file from another server"


def test_picture_equals_that_of_the_current_view() -> None:
    drawn = make_picture.picture(make_picture.recorded_state())
    remedy = "run .venv/bin/python -m rrl.docs.make_picture, and look at the picture"
    assert drawn == make_picture.PICTURE.read_text(), remedy


def test_run_without_a_failure_gives_no_picture(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        make_picture.representative_state(Story().works().written(tmp_path))


# ── the README's programs ──────────────────────────────────────────────────────────────────────────────────────────
_HELD = {"me": Worker, "work": WorkLease, "new": NewWeights, "batch": Batch, "part": Part}
"""Type of each variable in the README's programs."""


def _programs(page: str = "README.md") -> list[str]:
    return [block for language, block in _FENCED.findall((ROOT / page).read_text()) if language == "python"]


_API_PROGRAMS = [
    pytest.param(program, id=f"{page} {next(one for one in ('parts', 'commit', 'append') if f'.{one}(' in program)}")
    for page in ("README.md", "docs/bring-your-own.md")
    for program in _programs(page)
    if "me.phase" in program
]
"""The programs of the README, and of the complete example in docs/bring-your-own.md."""


def _attributes(kind: type) -> set[str]:
    """Return the attributes of an instance: the attributes of its class, and those that the methods assign."""
    body = ast.walk(ast.parse(inspect.getsource(kind)))
    made = {one.attr for one in body if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
    return set(dir(kind)) | made


def _used(program: str) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield each attribute that a program uses of a variable whose type is known, with the variable's name."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _HELD:
            yield node.value.id, node


@pytest.mark.parametrize("program", _API_PROGRAMS)
def test_program_of_a_page_uses_only_existing_names_of_the_worker_api(program: str) -> None:
    used = [(name, node.attr) for name, node in _used(program)]
    assert ("me", "phase") in used
    assert not [f"{name}.{attribute}" for name, attribute in used if attribute not in _attributes(_HELD[name])]
    offered = set(re.findall(r"\brrl\.(\w+)", program))
    assert offered <= set(dir(rrl))


def test_pages_on_own_code_and_python_name_every_public_name_of_the_package() -> None:
    own_code, python = ((ROOT / "docs" / name).read_text() for name in ("bring-your-own.md", "python.md"))
    methods = {name for name in vars(Worker) if not name.startswith("_")} | {"job", "options", "run_dir"}
    runs = {"rrl.submit", "rrl.run", "rrl.Run"} | {f"run.{name}" for name in vars(Run) if not name.startswith("_")}
    missing = [name for name in dir(rrl) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", own_code + python)]
    missing += [f"me.{name}" for name in sorted(methods) if not re.search(rf"\bme\.{name}\b", own_code)]
    missing += [name for name in sorted(runs) if not re.search(rf"`{re.escape(name)}\b", python)]
    assert (len(methods) > 25, len(runs)) == (True, 12)
    assert missing == []


def test_programs_of_the_readme_have_at_most_the_stated_length() -> None:
    lengths = [len([line for line in program.splitlines() if line.strip()]) for program in _programs()]
    assert len(lengths) == 2
    assert max(lengths) <= 16


@pytest.mark.parametrize("program", _API_PROGRAMS)
def test_program_of_a_page_calls_the_worker_api_with_valid_arguments(program: str) -> None:
    for call in [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in _HELD:
                named = {one.arg or "": one for one in call.keywords}
                inspect.signature(getattr(_HELD[name], method)).bind(None, *call.args, **named)


_MY_CODE = """
import torch
from rrl.roles.trajectories.types import Segment


class Trainer:
    def __init__(self, files):
        self.weight = torch.zeros(3)

    def state_dict(self):
        return {"weight": self.weight}

    def update(self, trajectories):
        self.weight += 1
        return 0.5

    def save(self, folder):
        torch.save(self.weight, folder / "weight.pt")
        return [folder / "weight.pt"]


class Engine:
    def load(self, version, tensors):
        self.version, self.weight = version, dict(tensors)["weight"].clone()
        assert (self.weight == version.step).all()

    def generate(self, items):
        for item in items:
            done = sum(len(segment.tokens) for segment in item.so_far)
            tokens = (*[item.prompt[0]] * 4, 1)[done:]
            logprobs = (-1.0,) * len(tokens)
            yield [Segment(item.trajectory, done, tokens, logprobs, self.version)], [item.trajectory]
"""
"""The code of a user that is sufficient for the README's programs.

The light task expects the prompt's digit four times.
"""


@pytest.mark.torch
def test_programs_of_the_readme_train_a_run_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trainer, rollout = _programs()
    toml = light_job("local", 3, rollouts=1, spares=0, warm=False, one_node=True)
    for light, program in (("light_trainer.py", trainer), ("light_rollout.py", rollout)):
        name = light.replace("light", "my")
        (tmp_path / name).write_text(program)
        toml = toml.replace(f"{LIGHT}/{light}", name)
    (tmp_path / "my_code.py").write_text(_MY_CODE)
    assert f'command = ["{sys.executable}", "my_trainer.py"]' in toml
    run: TestRun = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 3), state.why
    assert state.metrics.items() >= {"loss": 0.5, "reward": 1.0}.items()
    run.wait_gone()
    check_sound(run.run)
