"""Characters that control a terminal are escaped, and all other text stays as it is."""

from __future__ import annotations

import json
import unicodedata

from rrl.core.text import escaped, escaped_json, escaped_lines

HOSTILE = "\x1b]0;title\x07 \x1b[2J \x9b31m \x90q\x9c \u202eevil\u2066 \x7f \r \x00"


def test_escaped_text_has_no_control_characters_and_no_direction_marks() -> None:
    every = "".join(chr(code) for code in range(0x110000))
    left = {sign for sign in escaped(every) if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")}
    assert left == {"\t"}
    assert not {unicodedata.bidirectional(sign) for sign in escaped(every)} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    }


def test_escaped_text_stays_readable() -> None:
    assert escaped("a\x1b[31mb\x9b\u202e\nc") == r"a\x1b[31mb\x9b\u202e\nc"
    assert escaped_lines("a\nb\r\n") == "a\nb\\r\n"
    assert escaped("ä → 日本 [red] \\x1b\tok") == "ä → 日本 [red] \\x1b\tok"


def test_escaped_json_document_has_the_same_content() -> None:
    document = json.dumps({"text": HOSTILE, "list": ["\u2028"]}, ensure_ascii=False, indent=2)
    safe = escaped_json(document)
    assert json.loads(safe) == json.loads(document)
    assert all(escaped(line) == line for line in safe.split("\n"))
