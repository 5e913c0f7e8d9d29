"""Compares what the commands print with ``--json`` with the JSON Schema that ``rrl schema`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

from rrl.cli.output_schemas import output_schema


def assert_fits_its_schema(name: str, document: Mapping[str, Any]) -> None:
    """Check that a printed object has the keys of the schema ``name``, no others, with values of their types."""
    schema = output_schema(name)
    assert set(document) == set(schema["properties"])
    jsonschema.Draft202012Validator(schema).validate(document)
