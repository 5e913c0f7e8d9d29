"""The reasoning of an answer as an opaque text, which a client stores and sends back without reading it.

Responses has ``encrypted_content`` for it, and Messages ``signature``. Some clients send back only this text. It holds
the reasoning itself, because the endpoint stores no answers as text. All functions are pure.
"""

from __future__ import annotations

import base64

_MARK = "rrl1."
"""Beginning of these texts, with the version of the encoding."""


def seal(reasoning: str) -> str:
    """Return reasoning as an opaque text, which is never empty."""
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: object) -> str:
    """Return the reasoning in a value that a client sent; empty if :func:`seal` has not made it."""
    if not isinstance(sealed, str) or not sealed.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
