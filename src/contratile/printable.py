"""Make untrusted text safe to print: captions, keys and file names may contain terminal escape sequences.

    print(printable(caption))                       # one line
    print(printable(str(error), lines=True))        # keeps line breaks

Text is cleaned only where it is printed; files and reports keep it unchanged.
"""

import re

_SEQUENCES = re.compile(
    # CSI: colours, cursor, screen.
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]?"
    # OSC, DCS, SOS, PM, APC with their terminators: titles, links, the clipboard. An unterminated one is not matched
    # here, as our own text may follow it.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,1000}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]{0,8}[0-~]?"
)
_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the text
    r"\u2028\u2029]"
)
_SURROGATES = re.compile(r"[\ud800-\udfff]")


def printable(text: str, *, lines: bool = False) -> str:
    """Remove escape sequences, control characters and marks that change the direction of the text.

    Args:
        text: Text from a file.
        lines: Keep line breaks and tabs. Otherwise each run of them becomes a space, so that text cannot fake a line.

    Returns:
        Text that a terminal shows literally. Undecodable bytes become U+FFFD.

    Examples:
        >>> printable("red\\x1b[2J circle\\nERROR: disk full")
        'red circle ERROR: disk full'
    """
    text = _SEQUENCES.sub("", text)
    if not lines:
        text = _BREAKS.sub(" ", text)
    return _SURROGATES.sub("\ufffd", _INVISIBLE.sub("", text))
