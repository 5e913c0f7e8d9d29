"""Configuration of the documentation site, which Sphinx builds from the Markdown pages: ``make docs``.

docs/index.md is the navigation: each of its sections is a section of the sidebar, and each page that it links is an
entry. A page without such a link fails the build, as do dead links and dead anchors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
FIRST_PAGE = "index.html"

project = "rrl"
author = "the authors of rrl"
copyright = author
html_title = "rrl"
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [
    ".*",
    "api",
    "benchmarks",
    "build",
    "cli",
    "config",
    "core",
    "examples",
    "health",
    "manager",
    "roles",
    "cluster",
    "slurm_templates",
    "tests",
    "transport",
    "wheelhouse",
    "**/__pycache__",
]
highlight_language = "text"
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]  # _check_navigation warns of such pages, not Sphinx

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[[^]]+\]\(([^)#]+)\.md\)", re.MULTILINE)
RECORDS = "docs/adr/README"
"""The page with the table of the architecture decision records. Each record is an entry below this page."""
_RECORD = re.compile(r"\((\d{4}-[^)]+)\.md\)")
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Connect the functions below to the build."""
    app.connect("source-read", _add_navigation)
    app.connect("env-check-consistency", _check_navigation)
    app.connect("build-finished", _write_first_page)


def _add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Add a hidden table of contents to each section of docs/index.md, and to the page of the decision records."""
    if page == RECORDS:
        source[0] += _toctree(_RECORD.findall(source[0]))
    elif page == root_doc:
        _, *parts = _SECTION.split(source[0])
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            source[0] += _toctree(_ENTRY.findall(text), title)


def _toctree(pages: list[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""]) if pages else ""


def _check_navigation(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each page that no link of the navigation reaches; ``-W`` makes the warning an error."""
    reached = {root_doc, *(page for pages in env.toctree_includes.values() for page in pages)}
    for page in sorted(env.found_docs - reached):
        link = f"{page.removeprefix('docs/')}.md" if page.startswith("docs/") else f"../{page}.md"
        _log.warning(
            "%s is not in the navigation: add the line '- [Title](%s): what it is about' to a section of %s",
            f"{page}.md",
            link,
            f"{root_doc}.md",
        )


def _write_first_page(app: Sphinx, failure: Exception | None) -> None:
    """Write index.html at the top of the site, which leads to the first page."""
    if failure is None and app.builder.format == "html":
        target = f"{root_doc}.html"
        Path(app.outdir, FIRST_PAGE).write_text(f'<meta http-equiv="refresh" content="0; url={target}">\n')
