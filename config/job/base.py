"""The base class of job.toml's tables, types that several tables share, and errors about several keys."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ...core.units import seconds, size
from ..import_paths import IMPORT_PATH


class Table(BaseModel):
    """A table of job.toml.

    Values are validated strictly: "10" is not a number, and true is not 1. The docstring under a field is its
    description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def mistake(at: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """Return an error about several fields, to be reported at the key ``at`` (path from the root of job.toml)."""
    return PydanticCustomError("mistake", "{message}", {"at": at, "message": message})


def environment(env: dict[str, str]) -> dict[str, str]:
    """Return a table of environment variables if all names are valid.

    Raises:
        ValueError: A name is not valid.
    """
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not a valid environment variable name; use letters, digits and underscores")
    return env


def sbatch_options(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Return a table of sbatch options if all names and values are valid.

    Raises:
        ValueError: A name or value is not valid.
    """
    for name, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{name!r} is not an sbatch option; write its long name without leading dashes")
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"the value of {name} must be printable and on one line")
    return options


def _duration(value: object) -> object:
    if isinstance(value, str):
        return seconds(value)
    raise ValueError(f'a duration needs a unit; write for example "{value}s"')


def _size(value: object) -> object:
    if isinstance(value, str):
        return size(value)
    raise ValueError(
        f'a size needs a unit; write for example "{value if isinstance(value, int) and value > 0 else 512}MiB"'
    )


DURATION = BeforeValidator(_duration)
SIZE = BeforeValidator(_size)
Duration = Annotated[float, DURATION]
"""A duration: seconds in Python, a string with a unit in TOML."""
Size = Annotated[int, SIZE]
"""A size: bytes in Python, a string with a unit in TOML."""
OptionalSize = Annotated[int | None, SIZE, Field(ge=1)]
Strings = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
"""A list of strings. It is not strict, because strict validation of a tuple would reject TOML's lists."""
Time = Annotated[Duration, Field(gt=0)]
OptionalTime = Annotated[float | None, DURATION, Field(gt=0)]
MAX_REPLICAS = 4096
Count = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Function = Annotated[str, Field(pattern=f"^{IMPORT_PATH}$")]
"""A function, written as ``module:function``."""
SbatchOptions = Annotated[dict[str, str | int | bool], AfterValidator(sbatch_options)]
"""Long options of sbatch(1) without their dashes; true stands for a flag."""
