"""Build the sdist and the wheel of rrl, and check them: make dist REPOSITORY=https://...

    .venv/bin/python -m rrl.docs.make_release https://git.example.org/team/rrl dist

They are built from a copy of the tree, because setuptools leaves folders beside pyproject.toml. In the copy, the links
and pictures of README.md lead to the tag of this version in the repository, because an index shows the page without the
files that it links. The version comes from pyproject.toml.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from readme_renderer import markdown

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "tests", "benchmarks", "examples", "docs", "build", "dist", "wheelhouse")
_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def version() -> str:
    """Return the version of rrl from pyproject.toml, the only file that has it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def with_absolute_links(page: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures lead to the tag of this version in the repository."""

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}[{link[2]}]({repository}/{'raw' if link[1] else 'blob'}/v{version()}/{link[3]})"

    return _RELATIVE_LINK.sub(absolute, page)


def build(repository: str, out: Path) -> list[Path]:
    """Build the sdist, build the wheel from it, and return both files.

    Args:
        repository: URL of the repository, without a slash at its end.
        out: Folder for the files; it is created.

    Raises:
        ValueError: The build failed, or an index would not show the description.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rrl"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        readme = copy / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), repository), encoding="utf-8")
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(_urls(repository))
        command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"the build failed:\n{done.stdout}{done.stderr}")
    files = [*sorted(out.glob(f"*-{version()}.tar.gz")), *sorted(out.glob(f"*-{version()}-*.whl"))]
    if markdown.render(description(files[-1])) is None:
        raise ValueError(f"{files[-1]}: the description cannot be rendered")
    return files


def description(wheel: Path) -> str:
    """Return the description of a wheel, which an index shows as its page."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return str(Parser().parsestr(archive.read(name).decode()).get_payload())


def _urls(repository: str) -> str:
    pages = {
        "Repository": "",
        "Issues": "/issues",
        "Documentation": f"/blob/v{version()}/docs/index.md",
        "Changelog": f"/blob/v{version()}/CHANGELOG.md",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{repository}{path}"\n' for name, path in pages.items())


def main() -> None:
    """Build into the folder that the command line names."""
    if len(sys.argv) != 3 or not sys.argv[1].startswith("https://"):
        sys.exit(
            "the repository's URL is missing; write for example: make dist REPOSITORY=https://example.org/team/rrl"
        )
    for file in build(sys.argv[1].rstrip("/").removesuffix(".git"), Path(sys.argv[2])):
        print(file)


if __name__ == "__main__":
    main()
