"""The file of ``[task] file``: the rows that are accepted, and the messages about all other rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from rrl.config.prompt_file import PromptFileError, open_rows

ROWS = [{"question": f"{i}+1=", "answer": i + 1, "level": {"name": "easy"}} for i in range(5)]


def lines_of(path: Path, lines: list[Any]) -> Path:
    """Write lines: a string as it is, any other value as JSON."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_both_formats_are_read_by_number(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".parquet":
        parquet.write_table(Table.from_pylist(ROWS), path)
    else:
        lines_of(path, [ROWS[0], "", *ROWS[1:]])
    rows = open_rows(path, "{question} {level[name]}", ["answer"])
    assert [rows.row(i) for i in (4, 0, 2)] == [ROWS[4], ROWS[0], ROWS[2]]
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{'question': 1}", ":3: not valid JSON: "),
        ({"question": "2+1="}, ':3: there is no column "answer"; this row has "question"'),
        ({"answer": 3}, ':3: there is no column "question"; this row has "answer"'),
        ({"question": None, "answer": 3}, ':3: column "question" is null; it must be text or a number'),
        ({"question": ["2+1="], "answer": 3}, ':3: column "question" is a list; it must be text or a number'),
        ({"question": "2+1=", "answer": True}, ':3: column "answer" is a boolean; it must be text or a number'),
        ({"question": " ", "answer": 3}, ":3: the prompt is empty (column 'question')"),
        (["2+1=", 3], ':3: is a list; each line must be an object: {"question": "...", "answer": "..."}'),
    ],
)
def test_bad_row_is_named_with_file_line_and_column(tmp_path: Path, bad: Any, complaint: str) -> None:
    path = lines_of(tmp_path / "prompts.jsonl", [ROWS[0], "", bad, ROWS[1]])
    with pytest.raises(PromptFileError) as caught:
        open_rows(path, "{question}", ["answer"])
    assert str(caught.value).startswith(f"{path}{complaint}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_file_in_another_encoding_is_named_with_its_first_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "où"}\n', encoding=encoding)
    with pytest.raises(PromptFileError, match=r"prompts.jsonl:1: is not UTF-8; convert the file, for example: iconv"):
        open_rows(path, "{question}")


def test_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "où"}\n{"question": "ici"}\n', encoding="utf-8-sig")
    rows = open_rows(path, "{question}")
    assert [rows.row(index) for index in range(len(rows))] == [{"question": "où"}, {"question": "ici"}]


def test_bad_row_of_a_parquet_file_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    parquet.write_table(Table.from_pylist([ROWS[0], {"question": None, "answer": 3}]), path)
    with pytest.raises(PromptFileError, match=r'prompts.parquet: row 2: column "question" is null'):
        open_rows(path, "{question}", ["answer"])


def test_prompt_that_does_not_fit_a_row_is_named(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "prompts.jsonl", [{"question": {"text": "1+1="}}, {"question": {"body": "1+1="}}])
    with pytest.raises(PromptFileError, match=r"prompts.jsonl:2: column \"question\" does not fit .*KeyError: 'text'"):
        open_rows(path, "{question[text]}")


def test_file_without_rows_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"prompts.jsonl: has no row"):
        open_rows(lines_of(tmp_path / "prompts.jsonl", ["", ""]), "{question}")
    with pytest.raises(PromptFileError, match=r"prompts.parquet: is not a parquet file: "):
        open_rows(lines_of(tmp_path / "prompts.parquet", ROWS), "{question}")
    with pytest.raises(PromptFileError, match=r"missing.jsonl: cannot be read: No such file"):
        open_rows(tmp_path / "missing.jsonl", "{question}")


def test_parquet_without_its_package_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PromptFileError, match=r"reading parquet needs pyarrow, which .* lacks") as caught:
        open_rows(tmp_path / "prompts.parquet", "{question}")
    assert caught.value.missing_package == "pyarrow"
