"""What reaches a terminal of a text that somebody else wrote."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contratile.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a \x1b[31mred\x1b[0m cat", "a red cat"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;cm0=\x07clip", "clip"),
        ("\x9b2Jgone\x9d0;t\x9cx", "gonex"),
        ("\x1bPq#0\x1b\\sixel", "sixel"),
        ("\x1bcreset \x1b(0lines", "reset lines"),
        ("invoice\u202egpj.exe\u2066", "invoicegpj.exe"),
        ("one\r\nforged\ttab\u2028x\x85y", "one forged tab x y"),
        ("ends in \x1b", "ends in "),
        ("unended \x1b]0;but the remedy stays", "unended 0;but the remedy stays"),
        ("name\udcff.png", "name\ufffd.png"),
        ("größe 大 👩‍🚀 é", "größe 大 👩‍🚀 é"),
        ("\x00\x07\x08\x7f", ""),
    ],
)
def test_sequences_are_taken_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_may_stay() -> None:
    assert printable("one\n\ttwo\r\n\x1b[2Jthree\x85", lines=True) == "one\n\ttwo\nthree"


@given(st.text(st.characters(codec=None) | st.sampled_from("\x1b\x9b\x9d[];\x07\\\n\u202e")), st.booleans())
def test_nothing_acts_and_nothing_is_left_to_strip(text: str, lines: bool) -> None:
    shown = printable(text, lines=lines)
    kept = "\n\t" if lines else ""
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in kept]
    assert printable(shown, lines=lines) == shown
    shown.encode()
