"""Parse and format durations (``"90s"``, Slurm's ``days-hours:minutes:seconds``) and sizes (``"16GiB"``)."""

from __future__ import annotations

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_WITH_UNIT = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|h|d)"
_AS_IN_SLURM = r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{2})(?::([0-9]{2}))?"
_SIZE = rf"([0-9]{{1,19}}(?:\.[0-9]{{1,9}})?)\s*({'|'.join(_BYTES)})"
DURATION_PATTERN = rf"^\s*(?:{_WITH_UNIT}|{_AS_IN_SLURM})\s*$"
"""Regular expression of durations, in the syntax that Python and JSON Schema (ECMA-262) share."""
SIZE_PATTERN = rf"^\s*{_SIZE}\s*$"
"""Regular expression of sizes, in the syntax that Python and JSON Schema (ECMA-262) share."""


def seconds(text: str) -> float:
    """Return the seconds of a duration: ``"500ms"``, ``"90s"``, ``"2h"``, or Slurm's ``"1-12:00:00"`` or ``"30:00"``.

    A number without a unit is rejected.

    Raises:
        ValueError: ``text`` is not a duration; the message has examples of valid durations.
    """
    text = text.strip()
    if match := re.fullmatch(_WITH_UNIT, text):
        return float(match[1]) * _SECONDS[match[2]]
    if match := re.fullmatch(_AS_IN_SLURM, text):
        days, first, second, third = match.groups()
        if third is None and days is None:  # sbatch(1) --time: minutes:seconds
            return int(first) * 60 + int(second)
        return int(days or 0) * 86400 + int(first) * 3600 + int(second) * 60 + int(third or 0)
    raise ValueError(f'{text!r} is not a duration; write for example "90s", "15min", "2h" or "1-12:00:00"')


def size(text: str) -> int:
    """Return the number of bytes of a size, such as ``"16GiB"`` or ``"512MiB"``.

    Raises:
        ValueError: ``text`` is not a size; the message has examples of valid sizes.
    """
    if match := re.fullmatch(_SIZE, text.strip()):
        number = float(match[1]) if "." in match[1] else int(match[1])
        nbytes = int(number * _BYTES[match[2]])
        if nbytes < 2**63 and not ("." in match[1] and match[2] == "B"):
            return nbytes
    raise ValueError(f'{text!r} is not a size; write for example "16GiB" or "512MiB"')


def slurm_time(duration: float) -> str:
    """Return seconds in the form ``days-hours:minutes:seconds`` of sbatch(1), rounded up to a whole second."""
    whole = int(-(-duration // 1))
    days, rest = divmod(whole, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def slurm_mem(nbytes: int) -> str:
    """Return a number of bytes as a value for ``--mem`` of sbatch(1): in MiB, rounded up to a whole number."""
    return f"{-(-nbytes // 2**20)}M"


def duration_text(duration: float) -> str:
    """Return a duration (s) as text for job.toml: as a whole number of the largest possible unit, else in seconds."""
    for unit, length in reversed(_SECONDS.items()):
        if length >= 1 and duration and duration % length == 0:
            return f"{duration / length:.0f}{unit}"
    return f"{duration:.9f}".rstrip("0").rstrip(".") + "s"


def size_text(nbytes: int) -> str:
    """Return a number of bytes as text for job.toml: as a whole number of the largest possible unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _BYTES[unit] == 0:
            return f"{nbytes // _BYTES[unit]}{unit}"
    return f"{nbytes}B"
