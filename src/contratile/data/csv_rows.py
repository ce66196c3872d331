"""Rows of a CSV file, each with the number of its line. A quote that nobody closes costs its own row and no other.

    for line, row in csv_rows(lines, ","):
        ...                      # row: its fields, or a text that says why it has none

After an opening quote the csv module reads on to whatever quote comes next, through thousands of rows if need be, and
says nothing. So records of several lines are looked at again: a quote that is still open at the end of the file or at
the module's limit, that is closed in the middle of a field, or that would enclose line after line of complete rows, is
a mistake, and reading goes on in the line below it.
"""

import csv
from collections import deque
from collections.abc import Iterator

OPEN_QUOTE = 'a quote is opened here and not closed (leave it out, or write "")'

ENCLOSED = 8
"""So many lines inside one field, three quarters of all there, with as many fields as the head are rows, no text."""


def csv_rows(lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str] | str]]:
    """The rows of a file, the head among them, each with the line it begins in.

    Args:
        lines: With their ends, as a file opened with `newline=""` gives them.
        separator: Between fields.

    Yields:
        The line, from 1 on, and the fields; or the line of a mistake, and what it is.
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
    """An iterator over lines that keeps those of the present record, and takes lines back."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.back: deque[str] = deque()
        self.taken: list[str] = []
        self.ended = False
        """No line was left when the record asked for one more."""

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
    """Which of a record's lines has a quote that was never meant to be closed where it is."""
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
    """Where the quote that opens at `place` is closed; two quotes are one that is part of the text. -1: nowhere."""
    end = text.find('"', place + 1)
    while end >= 0 and text[end + 1 : end + 2] == '"':
        end = text.find('"', end + 2)
    return end


def _fields(line: str, separator: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=separator), []))
    except csv.Error:
        return 0
