"""Foreign text on its way to a terminal: captions, keys and file names cannot move its cursor or change its title.

    print(printable(caption))                       # one line
    print(printable(str(error), lines=True))        # line breaks stay

Text is stripped where it is printed, and stays as it is everywhere else.
"""

import re

_SEQUENCES = re.compile(
    # Colours, cursor, screen: CSI.
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]?"
    # Titles, links, the clipboard: OSC, DCS, SOS, PM, APC with their ends. Without an end nothing more is taken: what
    # follows may be our own words.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,1000}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]{0,8}[0-~]?"
)
_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they turn the direction of reading
    r"\u2028\u2029]"
)
_SURROGATES = re.compile(r"[\ud800-\udfff]")


def printable(text: str, *, lines: bool = False) -> str:
    """The text without escape sequences, control characters and marks that turn the direction of reading.

    Args:
        text: Whatever came from a file.
        lines: Keep line breaks and tabs; else each run of them becomes a space, so that a text cannot forge a line.

    Returns:
        What a terminal shows as it is. Bytes that were not UTF-8 are shown as U+FFFD.
    """
    text = _SEQUENCES.sub("", text)
    if not lines:
        text = _BREAKS.sub(" ", text)
    return _SURROGATES.sub("\ufffd", _INVISIBLE.sub("", text))
