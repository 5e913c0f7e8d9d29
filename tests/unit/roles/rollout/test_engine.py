from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rrl.config.import_paths import SLEEPING
from rrl.core.run_spec import RoleSpec, RolloutSettings, RunSpec
from rrl.core.types import Resources
from rrl.roles.rollout import torch_engine
from rrl.roles.rollout.engine import Engine, load_engine

pytestmark = pytest.mark.torch

METHODS = [name for name in vars(Engine) if not name.startswith("_") and name not in SLEEPING]
CODE = f"""
class Whole:
    def __init__(self, me, model, tokenizer):
        self.given = (model, tokenizer)
for method in {METHODS}:
    setattr(Whole, method, lambda self: None)

class Half:
    def __init__(self, me, model, tokenizer): ...
    def step(self): ...

def prepare(me, model, tokenizer):
    me.prepared = True
    return lambda: Whole(me, model, tokenizer)

def eager(me, model, tokenizer):
    return Whole(me, model, tokenizer)

def short(me):
    return Whole
"""


def _me(folder: Path, engine: str, guest: bool = False) -> Any:
    (folder / "engines_of_mine.py").write_text(CODE)
    role = RoleSpec("h20", "rollout", 1, 0, Resources(), True, ())
    job, launch = RunSpec("x", 1, "slurm", (role,), ()), SimpleNamespace(cwd=str(folder), role="h20", guest=guest)
    return SimpleNamespace(job=job, rollout=RolloutSettings(engine=engine), launch=launch, prepared=False)


@pytest.mark.parametrize(("name", "prepared"), [("Whole", False), ("prepare", True)])
def test_own_engine_is_built_by_its_class_or_by_what_its_function_prepared(
    tmp_path: Path, name: str, prepared: bool
) -> None:
    me, model, tokenizer = _me(tmp_path, f"engines_of_mine:{name}"), object(), object()
    build = load_engine(me, model, tokenizer)  # type: ignore[arg-type]
    assert me.prepared is prepared
    assert build().given == (model, tokenizer)  # type: ignore[attr-defined]


def test_engine_of_rrl_is_prepared_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "prepare", lambda me, model, tokenizer: METHODS.copy)
    assert load_engine(_me(tmp_path, "torch"), *[object()] * 2) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Whol", 'has no function Whol; did you mean "Whole"?'),
        ("short", '"engines_of_mine:short" cannot be called with me, model, tokenizer: too many positional arguments'),
        ("eager", "engines_of_mine:eager returned Whole; return a function that builds the engine, or name a class"),
        ("Half", f"engines_of_mine:Half built Half, an engine without {', '.join(m for m in METHODS if m != 'step')}"),
    ],
)
def test_unusable_engine_ends_the_rollout_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_engine(_me(tmp_path, f"engines_of_mine:{name}"), *[object()] * 2)()  # type: ignore[arg-type]
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert written.startswith("rrl: [rollouts.h20] engine: ")
    assert problem in written
    assert written.count("\n") == 1


@pytest.mark.parametrize("name", ["Whole", "prepare"])
def test_engine_that_cannot_sleep_is_refused_in_a_guest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_engine(_me(tmp_path, f"engines_of_mine:{name}", guest=True), *[object()] * 2)()  # type: ignore[arg-type]
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert "sleep" in written
    assert "wake" in written
    assert written.count("\n") == 1
