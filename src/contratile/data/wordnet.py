"""WordNet's words and their definitions: about 200,000 text pairs.

    WordNet("train")[0]      # "able", "having the necessary means or skill or know-how or authority to do something"

They are read from an installed WordNet (Debian's wordnet-base), from NLTK's copy, or from a folder with the files
data.noun, data.verb, data.adj and data.adv.

The test split holds out definitions by hash, each with one word and no word twice, so that every query has one answer.
Training contains neither a test definition nor a test word in any sense.
"""

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from contratile.data.sample import Kinds, Sample, Split, both_texts, held_out
from contratile.errors import bad_value

PARTS = ("noun", "verb", "adj", "adv")


class WordNet:
    """An indexed source: the word-definition pairs of one split.

    Args:
        split: "train" or "test".
        folder: Folder of WordNet's data files; None: search the usual places.
        test_share: Share of the definitions in the test split; None: both splits have all pairs.

    Raises:
        ValueError: WordNet is not installed, or its files are damaged.
    """

    kinds: Kinds = ("text", "text")
    sides = ("word", "definition")

    def __init__(self, split: Split, *, folder: Path | None = None, test_share: float | None = 0.1) -> None:
        self.name = f"wordnet ({split})"
        pairs = list(read(find_wordnet(folder)))
        if test_share is not None:
            test = _one_answer_each([pair for pair in pairs if held_out(pair.right, test_share)])
            words = {pair.left for pair in test}
            train = [pair for pair in pairs if not held_out(pair.right, test_share) and pair.left not in words]
            pairs = train if split == "train" else test
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        return self._pairs[index]

    def texts(self) -> Iterator[str]:
        return chain.from_iterable(map(both_texts, self._pairs))


def _one_answer_each(pairs: list[Sample]) -> list[Sample]:
    """Keep only pairs whose word and definition did not occur before."""
    words: set[str | object] = set()
    definitions: set[str] = set()
    kept = []
    for pair in pairs:
        if pair.left not in words and pair.right not in definitions:
            kept.append(pair)
            words.add(pair.left)
            definitions.add(pair.right)
    return kept


def read(folder: Path) -> Iterator[Sample]:
    """Yield every word of every synset with its definition, in the order of the files."""
    for part in PARTS:
        file = folder / f"data.{part}"
        with file.open(encoding="latin-1") as lines:
            for number, line in enumerate(lines, 1):
                if line.startswith("  "):
                    continue  # the licence
                try:
                    yield from _pairs_of(line, part)
                except (ValueError, IndexError):
                    remedy = "Reinstall it, or name the folder of an intact WordNet: wordnet:FOLDER."
                    got = f"line {number}: {line[:40].rstrip()!r}"
                    bad_value(str(file), expected="synsets in WordNet's data format", got=got, remedy=remedy)


def _pairs_of(line: str, part: str) -> list[Sample]:
    head, gloss = line.split(" | ", 1)
    fields = head.split(" ")
    words = fields[4::2][: int(fields[3], 16)]
    # Examples follow the definition in quotes; "(a)", "(p)" and "(ip)" mark the position of adjectives.
    definition = re.split(r';\s*"', gloss, maxsplit=1)[0].strip()
    if not words or not definition:
        raise ValueError("a synset without words or definition")
    plain = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words]
    return [Sample(word, definition, f"{part}/{fields[0]}/{word}") for word in plain]


def find_wordnet(folder: Path | None) -> Path:
    """The folder of WordNet's data files.

    Args:
        folder: Where to look; None: environment variables and the usual places.

    Raises:
        ValueError: They are not there.
    """
    if folder is not None:
        places = [folder / below for below in ("", "dict", "usr/share/wordnet")]
    else:
        homes = [Path(os.environ[name]) for name in ("WNSEARCHDIR", "WNHOME", "NLTK_DATA") if os.environ.get(name)]
        homes += [Path("/usr/share/wordnet"), Path("/usr/share/nltk_data"), Path.home() / "nltk_data"]
        places = [home / below for home in homes for below in ("", "dict", "corpora/wordnet")]
    for place in places:
        if all((place / f"data.{part}").is_file() for part in PARTS):
            return place
    remedy = (
        "Install Debian's wordnet-base, or unpack it anywhere (apt-get download wordnet-base && "
        "dpkg-deb -x wordnet-base_*.deb wordnet) and name the folder: wordnet:wordnet"
    )
    got = f"none in {', '.join(map(str, places))}"
    bad_value("wordnet", expected="the files data.noun, data.verb, data.adj and data.adv", got=got, remedy=remedy)
