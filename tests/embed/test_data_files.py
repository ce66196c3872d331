"""The files behind the name of some data."""

from pathlib import Path

import pytest

from contratile.embed.data_files import data_state


def test_the_state_of_data(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    (tmp_path / "photos" / "dogs").mkdir(parents=True)
    photo = tmp_path / "photos" / "dogs" / "1.png"
    photo.write_bytes(b"1")
    (tmp_path / "photos" / "round").symlink_to(tmp_path / "photos")
    (tmp_path / "0.tar").write_bytes(b"0")
    names = [f"{tmp_path}/photos/", f"{tmp_path}/{{0..1}}.tar", f"hf:{tmp_path}/photos"]
    before = [data_state(name) for name in names]
    assert [state.split(",")[0] for state in before] == ["1 file of 1 bytes"] * 3
    (tmp_path / "photos" / ".f.npy.unfinished").mkdir()
    (tmp_path / "photos" / ".f.npy.unfinished" / "1.png").write_bytes(b"")
    assert [data_state(name) for name in names] == before
    photo.write_bytes(b"12")
    (tmp_path / "1.tar").write_bytes(b"1")
    assert not {data_state(name) for name in names} & set(before)
    assert len({data_state(name) for name in ("", "icons", "hf:nobody/nothing", "http://localhost/0.tar")}) == 1
