"""Compares what the commands print with ``--json`` with the page that describes it (docs/json.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rrl.cli.common.output import JSON_SCHEMA
from rrl.docs.make_json import OUTPUTS, Output
from rrl.docs.struct_tables import Tables


def output_of(command: str) -> Output:
    (output,) = [one for one in OUTPUTS if one.command == command]
    return output


def assert_keys_of_the_page(command: str, document: Mapping[str, Any]) -> None:
    """Check that an object that a command has printed has exactly the keys that the page lists for it."""
    output = output_of(command)
    tables = Tables(output.structs)
    rows = [line for struct in output.structs for line in tables.table(struct).splitlines() if line.startswith("| `")]
    differing = set(document) ^ {"schema", *(row.split("`")[1] for row in rows)}
    assert not differing, f"{command}: only in its output or only on the page: {sorted(differing)}"
    assert document["schema"] == JSON_SCHEMA
