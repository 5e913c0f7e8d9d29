"""Extras of segments: bytes that a rollout makes and only the trainer reads (``[sampling.extras]``).

An extra has a fixed number of bytes for each token (its *width*), or some bytes for the whole trajectory (width 0). The
packed form contains the width, so that tokens can be cut and joined with their extras without the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ...core.run_spec import MAX_SEGMENT_EXTRAS, ExtraSpec
from ...core.text import shortened

PackedExtras = tuple[tuple[str, int, bytes], ...]
"""(name, width, bytes) of each extra of some consecutive tokens, in the order of the names."""
_HEADER_BYTES = 64
"""Upper bound of the bytes of an extra in a message besides its data: its name, its width and their headers."""


def pack_extras(extras: Mapping[str, bytes], tokens: int, declared: Mapping[str, ExtraSpec]) -> PackedExtras:
    """Pack the extras of a segment of ``tokens`` tokens.

    Raises:
        TypeError: ``extras`` is not a mapping, or an extra is not of type bytes.
        ValueError: An extra is not declared, lacks although each token must have it, or is not as long as declared.
    """
    if not isinstance(extras, Mapping):
        raise TypeError(f'extras is of type {type(extras).__name__}; it must be a dict, such as {{"name": bytes}}')
    if not declared and not extras:
        return ()
    for name, given in extras.items():
        if name not in declared:
            names = f"declared are {', '.join(sorted(declared))}" if declared else "the job declares none"
            raise ValueError(f"extra {shortened(name)} is not declared in [sampling.extras]; {names}")
        if not isinstance(given, bytes):
            raise TypeError(f"extra {name!r} is of type {type(given).__name__}; it must be bytes")
    packed = []
    for name, spec in sorted(declared.items()):
        data = extras.get(name)
        if spec.per_token is not None:
            size = len(data or b"")
            if size != tokens * spec.per_token:
                has = "is missing" if data is None else f"has {size} bytes"
                right = f"{tokens} tokens take {tokens * spec.per_token} bytes, {spec.per_token} each"
                raise ValueError(f"extra {name!r} {has}; {right}")
        elif data is not None and spec.per_trajectory is not None and len(data) > spec.per_trajectory:
            raise ValueError(f"extra {name!r} has {len(data)} bytes; [sampling.extras] allows {spec.per_trajectory}")
        if data is not None:
            packed.append((name, spec.per_token or 0, data))
    if (size := sum(len(data) for _, _, data in packed)) > MAX_SEGMENT_EXTRAS:
        most = f"a segment may have at most {MAX_SEGMENT_EXTRAS >> 20} MiB"
        raise ValueError(f"its extras have {size / 2**20:.1f} MiB; {most}: append several shorter segments")
    return tuple(packed)


def cut(extras: PackedExtras, start: int, end: int) -> PackedExtras:
    """Return the extras of the tokens from ``start`` to ``end``; those of the trajectory stay whole."""
    return tuple((name, width, data[start * width : end * width] if width else data) for name, width, data in extras)


def join(parts: Iterable[tuple[PackedExtras, int]]) -> PackedExtras:
    """Join the extras of parts that follow each other, each with its number of tokens.

    Tokens without an extra that other tokens have get zeros: given tokens. Of several extras of the whole trajectory
    with the same name, which the turns of an episode can have, the last one counts.
    """
    parts = list(parts)
    return tuple(
        (name, width, b"".join(_values(name, width, parts)) if width else _last(name, parts))
        for name, width in sorted(_widths(parts).items())
    )


def joined_bytes(parts: Iterable[tuple[PackedExtras, int]]) -> int:
    """Return an upper bound of the bytes of the joined extras in a message."""
    parts = list(parts)
    tokens, widths = sum(count for _, count in parts), _widths(parts)
    whole = sum(len(_last(name, parts)) for name, width in widths.items() if not width)
    return tokens * sum(widths.values()) + whole + _HEADER_BYTES * len(widths)


def _widths(parts: list[tuple[PackedExtras, int]]) -> dict[str, int]:
    return {name: width for extras, _ in parts for name, width, _ in extras}


def _values(name: str, width: int, parts: list[tuple[PackedExtras, int]]) -> Iterator[bytes]:
    for extras, count in parts:
        data = next((data for other, _, data in extras if other == name), None)
        yield bytes(width * count) if data is None else data


def _last(name: str, parts: list[tuple[PackedExtras, int]]) -> bytes:
    return next(data for extras, _ in reversed(parts) for other, _, data in extras if other == name)
