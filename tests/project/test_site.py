"""The documentation site builds without a warning about a dead link or anchor, or a page outside of the navigation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRICT = ("-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-c", "docs")
"""The arguments with which ``make docs`` builds the site."""


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *STRICT, "-d", str(out / "doctrees"), "-b", "html", ".", str(out / "html")]
    return subprocess.run(command, cwd=source, capture_output=True, text=True)


def test_make_docs_builds_the_site_strictly() -> None:
    assert f"$(BIN)/python {' '.join(STRICT)} " in (ROOT / "Makefile").read_text()


def test_the_site_has_no_dead_link_and_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {str(path.relative_to(ROOT).with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {str(path.relative_to(tmp_path / "html")) for path in (tmp_path / "html").rglob("*.html")}
    assert "docs/index.html" in (tmp_path / "html" / "index.html").read_text()


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build a site with mistakes, and return the warnings of the build."""
    source = tmp_path_factory.mktemp("site")
    (source / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", source / "docs")
    (source / "docs" / "index.md").write_text("# Site\n\n## Reference\n- [One](one.md): a page\n")
    (source / "docs" / "one.md").write_text(
        "# One\n\n## Here\n[a](two.md), [b](#there), [c](one.md#there), [d](#here)\n"
    )
    (source / "docs" / "lost.md").write_text("# Lost\n")
    done = build(source, source / "out")
    assert done.returncode == 1
    return done.stderr


def test_a_dead_link_fails_the_build(complaints: str) -> None:
    assert "cross-reference target not found: 'two.md'" in complaints


def test_a_dead_anchor_fails_the_build(complaints: str) -> None:
    assert complaints.count("there'") == 2, complaints
    assert "here'" not in complaints.replace("there'", "")


def test_a_page_outside_of_the_navigation_fails_the_build_with_what_to_do(complaints: str) -> None:
    assert "docs/lost.md is not in the navigation: add the line '- [Title](lost.md): " in complaints
    assert "to a section of docs/index.md" in complaints
