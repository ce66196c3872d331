"""WordNet: the format, the split, the message when there is none."""

from pathlib import Path

import pytest

from contratile.data import wordnet
from contratile.data.wordnet import PARTS, WordNet

NOUNS = """  1 This software and database is being provided to you, the LICENSEE, by
  2 Princeton University under the following license.
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 ~ 00002137 n 0000 | that which is perceived to exist; "a | b"
00002684 03 n 02 object 0 physical_object 0 001 @ 00001930 n 0000 | a tangible and visible entity; it casts shade
"""
ADJECTIVES = """00001740 00 a 01 able(p) 0 000 | (usually followed by `to') having the means; "able to swim"; "able"
00002000 00 a 0b a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 caf\xe9 0 000 | eleven words
"""


def write(folder: Path, **parts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        (folder / f"data.{part}").write_text(parts.get(part, ""), encoding="latin-1")
    return folder


def test_format(tmp_path: Path) -> None:
    source = WordNet("train", folder=write(tmp_path, noun=NOUNS, adj=ADJECTIVES), test_share=None)
    pairs = [source[i] for i in range(len(source))]
    assert [(pair.left, pair.right) for pair in pairs[:4]] == [
        ("entity", "that which is perceived to exist"),
        ("object", "a tangible and visible entity; it casts shade"),
        ("physical object", "a tangible and visible entity; it casts shade"),
        ("able", "(usually followed by `to') having the means"),
    ]
    assert list(source.texts())[:2] == ["entity", "that which is perceived to exist"]
    assert len(pairs) == 15 and pairs[-1].left == "caf\xe9" and source.kinds == ("text", "text")
    assert pairs[2].key == "noun/00002684/physical object" and len({pair.key for pair in pairs}) == 15


@pytest.mark.parametrize("below", ["dict", "usr/share/wordnet", ""])
def test_found_below_the_folder(tmp_path: Path, below: str) -> None:
    write(tmp_path / below, noun=NOUNS)
    assert wordnet.find_wordnet(tmp_path) == tmp_path / below


def test_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WNHOME", str(tmp_path))
    write(tmp_path / "dict", noun=NOUNS)
    assert wordnet.find_wordnet(None) == tmp_path / "dict"


def test_no_wordnet_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        WordNet("train", folder=tmp_path)
    text = str(caught.value)
    assert "apt-get download wordnet-base && dpkg-deb -x" in text and str(tmp_path) in text and "data.noun" in text


@pytest.mark.parametrize("line", ["00001740 03 n 02 entity 0", "x | y", "00001740 03 n zz entity 0 000 | that"])
def test_a_damaged_file_names_its_line(tmp_path: Path, line: str) -> None:
    write(tmp_path, noun=NOUNS + line + "\n")
    with pytest.raises(ValueError, match=r"data.noun: expected synsets in WordNet's data format, got line 5"):
        WordNet("train", folder=tmp_path)


def test_split_shares_neither_words_nor_definitions(tmp_path: Path) -> None:
    """Words with several senses and senses with several words, at random."""
    lines = [f"{i:08d} 03 n 02 word{i % 70} 0 word{i * 7 % 90} 0 000 | meaning {i % 180}\n" for i in range(200)]
    folder = write(tmp_path, noun="".join(lines))
    train, test = (WordNet(split, folder=folder, test_share=0.1) for split in ("train", "test"))
    for side in ("left", "right"):
        seen, held = ([getattr(pair, side) for pair in split] for split in (train._pairs, test._pairs))
        assert not set(seen) & set(held) and len(set(held)) == len(held)
    assert len(test) > 5 and len(train) > 100
