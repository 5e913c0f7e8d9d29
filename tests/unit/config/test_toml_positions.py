from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rrl.config.toml_positions import Path, lines_of, nearest_line
from rrl.tests.support.examples import examples


def test_key_written_in_any_form_is_found_on_its_line() -> None:
    text = '''\
# a comment with [header] = "x"
top = 1
dotted.key . "quo.ted" = 2      # [not.a.header]
inline = { a = 1, b.c = { d = "}" } }
list = [ # comment ]
  "x, ]", 'y',

  { z = [1,
         2] },
]
text = """
[run]
steps = 1 \\""" still
"""
raw = \'\'\'
[x]\'\'\'\'
"\\u0061" = 1979-05-27 07:32:00

[table.sub]
key = 1
[table]
key = 2
[[many]]
n = 1
[many.inner]
k = 1
[[many.nested]]
q = 1
[[many]]
n = 2
[[many.nested]]
q = 2
[[many.nested]]
q = 3
'''
    lines = lines_of(text)
    expected: dict[Path, int] = {
        ("top",): 2,
        ("dotted",): 3,
        ("dotted", "key", "quo.ted"): 3,
        ("inline",): 4,
        ("inline", "a"): 4,
        ("inline", "b", "c", "d"): 4,
        ("list",): 5,
        ("list", 0): 6,
        ("list", 1): 6,
        ("list", 2): 8,
        ("list", 2, "z", 0): 8,
        ("list", 2, "z", 1): 9,
        ("text",): 11,
        ("raw",): 15,
        ("a",): 17,
        ("table",): 21,
        ("table", "sub"): 19,
        ("table", "sub", "key"): 20,
        ("table", "key"): 22,
        ("many",): 23,
        ("many", 0): 23,
        ("many", 0, "n"): 24,
        ("many", 0, "inner"): 25,
        ("many", 0, "inner", "k"): 26,
        ("many", 0, "nested", 0): 27,
        ("many", 0, "nested", 0, "q"): 28,
        ("many", 1): 29,
        ("many", 1, "n"): 30,
        ("many", 1, "nested", 0): 31,
        ("many", 1, "nested", 1): 33,
        ("many", 1, "nested", 1, "q"): 34,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert set(lines) == set(_paths(tomllib.loads(text), ()))


def test_elements_of_a_very_long_value_count_as_those_of_the_line_after_the_exact_ones() -> None:
    lines = lines_of("[a]\nlong = [\n" + "1,\n" * 20_000 + "]\nnext = 1\n")
    assert [lines["a", "long", index] for index in (0, 298, 299, 19_999)] == [3, 301, 302, 302]
    assert lines["a", "next"] == 20_004


def test_missing_key_is_located_at_its_table() -> None:
    lines = lines_of("\n[a.b]\nc = 1\n")
    assert nearest_line(lines, ("a", "b", "missing", "deep")) == 2
    assert nearest_line(lines, ("other",)) is None


def _paths(value: Any, path: Path) -> list[Path]:
    here = [path] if path else []
    if isinstance(value, dict):
        return here + [p for key, inner in value.items() for p in _paths(inner, (*path, key))]
    if isinstance(value, list):
        return here + [p for i, inner in enumerate(value) for p in _paths(inner, (*path, i))]
    return here


_KEY = st.sampled_from(["a", "b", "c", '"d.e"', "'f'", '"\\u0061b"', "1"])
_DOTTED = st.lists(_KEY, min_size=1, max_size=3).map(".".join)
_VALUE = st.recursive(
    st.sampled_from(["1", '"x"', "'#'", "true", "1.5", "1979-05-27", '"""a\n]"""', "'''\n[b]\n'''", '"\\""']),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ",\n".join(items) + "]")
        | inner.map(lambda one: "{ a = " + one + ", b.c = 2 }" if "\n" not in one else "{}")
    ),
    max_leaves=5,
)
_LINE = st.one_of(
    st.tuples(_DOTTED, _VALUE).map(lambda pair: f"{pair[0]} = {pair[1]} # tail"),
    _DOTTED.map(lambda key: f"[{key}]"),
    _DOTTED.map(lambda key: f"[[ {key} ]]"),
    st.sampled_from(["", "# [comment]", "   "]),
)


@examples(150, many=3000)
@given(st.lists(_LINE, max_size=8))
def test_scanner_finds_exactly_the_keys_that_the_parser_finds(lines: list[str]) -> None:
    text = ""
    for line in lines:  # keep a line only if the document stays valid
        try:
            tomllib.loads(text + line + "\n")
        except tomllib.TOMLDecodeError:
            continue
        text += line + "\n"
    assert set(lines_of(text)) == set(_paths(tomllib.loads(text), ()))
