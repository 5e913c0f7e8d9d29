"""Makes Markdown tables of the structs that rrl writes as JSON: keys, values, and the meanings in their docstrings."""

from __future__ import annotations

import inspect
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

from rrl.config.job.json_schema import field_docstrings

MAX_LISTED = 10
"""Largest number of values of an enum, or of structs of a union, that a cell lists; if there are more, the cell gives
only their number."""
_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    bytes: "text (base64)",
    Any: "any value",
    type(None): "null",
    dict: "object",
    list: "list",
    tuple: "list",
}


class Tables:
    """The tables of some structs, and of the structs in their fields at any depth, on one page."""

    def __init__(self, structs: Iterable[type[Struct]]) -> None:
        given = list(dict.fromkeys(structs))
        found = dict.fromkeys(given)
        waiting = list(given)
        while waiting:
            inside = [one for hint in _hints(waiting.pop()).values() for one in _structs_in(hint) if one not in found]
            found.update(dict.fromkeys(inside))
            waiting += inside
        same = Counter(struct.__name__ for struct in found)
        self._titles = {
            struct: struct.__name__ if same[struct.__name__] == 1 else f"{struct.__name__}-{_module(struct)}"
            for struct in found
        }
        assert len(set(self._titles.values())) == len(found), "two structs would have the same heading"
        self.inside = sorted((struct for struct in found if struct not in given), key=self._titles.__getitem__)
        """The structs that occur only in fields of the given structs, sorted by name."""

    def table(self, struct: type[Struct]) -> str:
        """Return the heading of a struct, to which other tables link, its docstring, and the table of its fields."""
        rows = list(self._rows(struct))
        table = ["| key | value | meaning |", "|---|---|---|", *rows, ""] if rows else []
        return "\n".join([f"### {self._titles[struct]}", "", meaning(inspect.getdoc(struct)), "", *table])

    def link(self, struct: type[Struct]) -> str:
        """Return a link to the table of a struct."""
        return f"[{self._titles[struct]}](#{self._titles[struct].lower()})"

    def _rows(self, struct: type[Struct]) -> Iterator[str]:
        hints, texts, config = _hints(struct), _docstrings(struct), struct.__struct_config__
        if config.tag is not None:
            yield f'| `{config.tag_field}` | `"{config.tag}"` | |'
        for field in fields(struct):
            yield f"| `{field.encode_name}` | {self._kind(hints[field.name])} | {meaning(texts.get(field.name))} |"

    def _kind(self, annotation: Any) -> str:
        """Return the JSON form of values of this type, as text."""
        if isinstance(annotation, NewType):
            return self._kind(annotation.__supertype__)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            if len(arguments) > MAX_LISTED:
                return f"one of {len(arguments)} objects"
            return " or ".join(dict.fromkeys(map(self._kind, arguments)))
        if origin is Literal:
            return ", ".join(f'`"{one}"`' for one in arguments)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return f"list of {', '.join(map(self._kind, arguments))}"
        if origin in (list, tuple, set, frozenset):
            return f"list: {self._kind(arguments[0])}"
        if origin is not None and issubclass(origin, dict):
            return f"object: {self._kind(arguments[-1])} by name"
        return self._kind_of_class(annotation) if isinstance(annotation, type) else _NAMES.get(annotation, "any value")

    def _kind_of_class(self, annotation: type) -> str:
        if issubclass(annotation, Enum):
            values = [f'`"{one.value}"`' if isinstance(one.value, str) else f"`{one.value}`" for one in annotation]
            return ", ".join(values) if len(values) <= MAX_LISTED else f"one of {len(values)} words"
        if issubclass(annotation, Struct):
            return self.link(annotation)
        if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
            return f"list of {', '.join(annotation._fields)}"
        return next((_NAMES[one] for one in annotation.__mro__ if one in _NAMES), "object")


def meaning(text: str | None) -> str:
    """Return a docstring as Markdown on one line."""
    plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"`\1`", " ".join((text or "").split()))
    return plain.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def _module(struct: type[Struct]) -> str:
    return struct.__module__.rpartition(".")[2]


def _structs_in(annotation: Any) -> Iterator[type[Struct]]:
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, Struct):
        yield annotation
    for argument in get_args(annotation):
        yield from _structs_in(argument)


def _hints(struct: type[Struct]) -> dict[str, Any]:
    hints = get_type_hints(struct)
    return {field.name: hints[field.name] for field in fields(struct)}


def _docstrings(struct: type[Struct]) -> dict[str, str]:
    """Return the docstrings under the fields of a struct, also of the structs that it inherits from."""
    bases = [base for base in reversed(struct.__mro__) if base is not Struct and issubclass(base, Struct)]
    return {name: text for base in bases for name, text in field_docstrings(base).items()}
