"""Check the folder in which a job's roles work: whose code it may contain, and what cannot be imported from it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...config.job.document import JobDocument
from ...core.ownership import foreign_writers
from ...core.run_dir import runs_root
from ...core.types import UsageError


def folder_doubts(document: JobDocument, folder: Path, trust: bool) -> list[str]:
    """Return a warning if a group may write the job's folder, and if others may exchange the directories of runs.

    Raises UsageError if every user may write the job's folder or one of its files, except if the user trusts it.
    """
    modules = (*folder.glob("*.py"), *folder.glob("*/__init__.py"), folder / "__pycache__")
    places = (folder, *document.files, *modules)
    writers = dict.fromkeys(one for place in places for one in foreign_writers(place))
    if (certain := [who for is_wrong, who in writers if is_wrong]) and not trust:
        raise UsageError(f"{certain[0]}, and so make code run as you; to run this job nevertheless: --trust-folder")
    return [*(f"{who}, and so make code run as you" for _, who in list(writers)[:1]), *runs_root_doubts()]


def runs_root_doubts() -> list[str]:
    """Return a warning if other users may exchange the directories of runs."""
    return [f"{who}, and so exchange run directories: chmod +t" for _, who in foreign_writers(runs_root() / "run")][:1]


def unimportable_modules(folder: Path) -> list[str]:
    """Return a warning if modules in the job's folder have the names of installed ones, which imports find first."""
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    specs = {name: find_spec(name) for name in sorted(names) if name.isidentifier() and name[:2] != "__"}
    same = [name for name, spec in specs.items() if spec and not (spec.origin or "").startswith(f"{folder.resolve()}/")]
    return [f"imports find the installed {', '.join(same)}, not what {folder} has: use other names"] if same else []
