"""Counts the logical lines of the product and its tests, and its missing seams.

A logical line ends with a NEWLINE token of Python's tokenizer, so formatting changes nothing. Strings that stand alone
(docstrings, comments of attributes) do not count. The product is the packages of pyproject.toml, and the documentation
is all Markdown of the repository in lines. "Before" is a commit (``--before``), counted by its own pyproject.toml;
"after" is the working tree. The seams are those of the working tree:

- ``type_checking_circles``: import circles of modules, where an import for type checkers counts;
- ``cluster_name_questions``: questions for a cluster's name (benchmarks/_cluster_questions.py);
- ``small_single_importer_modules``: modules of at most 80 lines that exactly one module imports.

The last line is one JSON object (benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from rrl.benchmarks._cluster_questions import cluster_questions
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.tests.support.import_graph import Product, has_code, strongly_connected
from rrl.tests.support.syntax_tree import parse

ROOT = Path(__file__).parents[1]
BEFORE = "8da9e8f0"
"""The commit before the issue that set the bars."""
SMALL_LINES = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", metavar="REV", default=BEFORE, help=f"the commit to compare with ({BEFORE})")
    options = parser.parse_args()
    check_requirements("code_lines")
    try:
        before = count(_files_of_commit(options.before))
    except subprocess.CalledProcessError:
        parser.error(f"--before {options.before}: git finds no such commit in {ROOT}")
    after = count(_files_of_working_tree())
    names = sorted(before | after, key=lambda name: (name.startswith("product "), name))
    print_table(
        ("logical lines", "before", "after", "change"),
        [(name, f"{before[name]:,}", f"{after[name]:,}", f"{after[name] - before[name]:+,}") for name in names],
    )
    product = Product(ROOT)
    circles, questions, small = import_circles(product), cluster_questions(ROOT), small_modules(product)
    for title, places in (
        ("import circle", circles),
        ("question for a cluster's name", questions),
        ("small module of one importer", small),
    ):
        print(f"\n{title}: {len(places)}", *(f"    {place}" for place in places), sep="\n")
    figures = {
        "product": after["product"],
        "tests": after["tests"],
        "docs": after["docs"],
        "product_before": before["product"],
        "tests_before": before["tests"],
        "type_checking_circles": len(circles),
        "cluster_name_questions": len(questions),
        "small_single_importer_modules": len(small),
    }
    print(last_line("code_lines", figures, {}, {"before": dict(before), "after": dict(after)}))


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def count(files: Mapping[str, str]) -> Counter[str]:
    """Return the lines of the product, of each of its folders, of the tests and of the documentation (Markdown).

    ``files`` are the texts by path, which include pyproject.toml.
    """
    packages = set(tomllib.loads(files["pyproject.toml"])["tool"]["setuptools"]["packages"])
    lines: Counter[str] = Counter()
    for path, text in files.items():
        folders = path.split("/")[:-1]
        if path.endswith(".md"):
            lines["docs"] += len(text.splitlines())
        elif not path.endswith(".py"):
            continue
        elif folders[:1] == ["tests"]:
            lines["tests"] += logical_lines(text)
        elif ".".join(("rrl", *folders)) in packages:
            lines["product"] += (own := logical_lines(text))
            lines[f"product {folders[0] if folders else '.'}"] += own
    return lines


def logical_lines(text: str) -> int:
    """Return the number of logical lines of a module, without strings that stand alone."""
    strings = {
        node.end_lineno
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NEWLINE and token.start[0] not in strings for token in tokens)


def _files_of_commit(revision: str) -> dict[str, str]:
    listed = _git("ls-tree", "-r", "-z", revision).decode().split("\0")[:-1]
    entries = [(head.split()[2], path) for head, _, path in (line.partition("\t") for line in listed) if _counts(path)]
    answer = io.BytesIO(_git("cat-file", "--batch", entered="".join(f"{name}\n" for name, _ in entries)))
    texts = {}
    for _, path in entries:
        size = int(answer.readline().split()[2])
        texts[path] = answer.read(size).decode()
        answer.read(1)
    return texts


def _files_of_working_tree() -> dict[str, str]:
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z").decode().split("\0")[:-1]
    return {path: (ROOT / path).read_text() for path in listed if _counts(path) and (ROOT / path).is_file()}


def _counts(path: str) -> bool:
    return path == "pyproject.toml" or path.endswith((".py", ".md"))


def _git(*arguments: str, entered: str = "") -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, input=entered.encode(), capture_output=True, check=True)
    return done.stdout


# ── seams ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def import_circles(product: Product) -> list[str]:
    edges = {(one.importer, one.imported) for one in product.imports}
    return [", ".join(sorted(members)) for members in strongly_connected(edges)]


def small_modules(product: Product) -> list[str]:
    """Return path, lines and importer of each small module that exactly one module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for one in product.imports:
        importers[one.imported].add(one.importer)
    texts = {module: path.read_text() for module, path in product.files.items()}
    return [
        f"{product.files[module].relative_to(product.root)} ({lines}) for {', '.join(importers[module])}"
        for module, text in texts.items()
        if (lines := len(text.splitlines())) <= SMALL_LINES and len(importers[module]) == 1 and has_code(text)
    ]


if __name__ == "__main__":
    main()
