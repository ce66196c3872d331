"""Rows of a CSV file with their line numbers. An unclosed quote costs only its own row.

    for line, row in csv_rows(lines, ","):
        ...                      # row: list of fields, or a message if it cannot be read

After an opening quote the csv module silently reads on to the next quote, through thousands of rows if necessary. So
records that span several lines are checked again. A quote is a mistake if it is still open at the end of the file or at
the module's field limit, if it is closed in the middle of a field, or if it encloses many complete rows. Reading then
continues on the line below it.
"""

import csv
from collections import deque
from collections.abc import Iterator

OPEN_QUOTE = 'a quote is opened here and not closed (leave it out, or write "")'

ENCLOSED = 8
"""A quoted field is a mistake if at least this many of its lines, and three quarters of them, look like rows."""


def csv_rows(lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str] | str]]:
    """Read the rows of a CSV file, including the header.

    Args:
        lines: Lines with their line breaks, as from a file opened with `newline=""`.
        separator: Separates fields.

    Yields:
        Line numbers, from 1 on, with the fields; or with a message, for a row that cannot be read.
    """
    source = _Lines(lines)
    reader = csv.reader(source, delimiter=separator)
    line, width = 1, 0
    while True:
        source.taken = []
        row, problem = None, ""
        try:
            row = next(reader, None)
        except csv.Error as error:
            problem = f"line cannot be read ({error})"
        taken = source.taken
        if not taken:
            return
        if len(taken) > 1 or source.ended:
            place = _open_quote(taken, separator, width)
            if place is not None:
                source.back.extendleft(reversed(taken[place + 1 :]))
                yield line + place, OPEN_QUOTE
                line += place + 1
                continue
        if problem or row:
            width = width or len(row or ())
            yield line, problem or row or []
        line += len(taken)


class _Lines:
    """An iterator over lines that remembers the lines of the current record and can take lines back."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.back: deque[str] = deque()
        self.taken: list[str] = []
        self.ended = False
        """Whether the current record asked for more lines than there are."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.back.popleft() if self.back else next(self._lines, None)
        self.ended = line is None
        if line is None:
            raise StopIteration
        self.taken.append(line)
        return line


def _open_quote(lines: list[str], separator: str, width: int) -> int | None:
    """The index of the line of a record with an unclosed quote, or None."""
    text, place, line, line_end = "".join(lines), 0, 0, len(lines[0])
    while place < len(text):
        while place >= line_end:
            line += 1
            line_end += len(lines[line])
        if text[place] == '"':
            end = _closing(text, place)
            rest = text[end + 1 : end + 100].lstrip(" \t" if separator != "\t" else " ")
            if end < 0 or (rest and rest[0] not in f"{separator}\r\n"):
                return line
            enclosed = lines[line + 1 : line + 1 + text.count("\n", line_end, end)]
            whole = sum(_fields(each, separator) == width for each in enclosed) if width > 1 else 0
            if whole >= max(ENCLOSED, 0.75 * len(enclosed)):
                return line
            place = end
        found = text.find(separator, place)
        place = len(text) if found < 0 else found + 1
    return None


def _closing(text: str, place: int) -> int:
    """Position of the quote that closes the one at `place`, skipping doubled quotes; -1 if there is none."""
    end = text.find('"', place + 1)
    while end >= 0 and text[end + 1 : end + 2] == '"':
        end = text.find('"', end + 2)
    return end


def _fields(line: str, separator: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=separator), []))
    except csv.Error:
        return 0
