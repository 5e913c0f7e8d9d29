from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_SHIPPED = {"tests", "benchmarks", "examples", "docs", "build", "dist"}


def test_the_wheel_has_every_folder_with_python_in_it() -> None:
    """The wheel has every folder with Python in it.

    A subpackage that pyproject.toml does not list is missing only from the wheel. No other test would find this.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    shipped = [
        folder
        for folder in folders
        if not any(part.startswith(".") for part in folder.parts) and not NOT_SHIPPED & set(folder.parts[:1])
    ]
    assert sorted(listed) == sorted(".".join(("rrl", *folder.parts)) for folder in shipped)


def test_every_package_has_an_init_file() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    without = [name for name in listed if not (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").exists()]
    assert not without


def test_import_of_rrl_imports_nothing_and_its_names_need_no_torch() -> None:
    code = """
        import sys, rrl
        assert not [name for name in sys.modules if name.startswith(("rrl.", "torch"))], "import rrl is slow"
        assert {"join", "Item", "NewWeights", "Score"} <= set(dir(rrl))
        tensors = {"LossSum", "LossTokens", "hf_names", "hf_tensors", "pack", "unpack"}
        assert rrl.Batch is rrl.Part
        from rrl import Item, NewWeights, Score
        assert all(getattr(rrl, name).__name__ == name for name in set(dir(rrl)) - tensors - {"Batch"})
        assert "torch" not in sys.modules
        assert all(callable(getattr(rrl, name)) for name in tensors)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_root_holds_no_python_but_the_package_itself() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
