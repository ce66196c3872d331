"""Names of data that a file gave start no programs; the same names do when they are typed."""

import pickle
from pathlib import Path

import pytest

from contratile.data import DataConfig, open_source
from contratile.data.foreign import Foreign, scheme
from contratile.data.shards import expand
from contratile.train.config_file import load_config
from tests.data.files import shard_members, write_tar

ORIGIN = "RUN/config.toml"


def opened(name: str, **options: str) -> list[object]:
    """Everything that can be read of it."""
    source = open_source(DataConfig(data=name, **{"test_data": name, **options}), "test")  # type: ignore[arg-type]
    return list(source.records(seed=None, epoch=0, part=0, parts=1))  # type: ignore[union-attr]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tar(tmp_path / "a.tar", shard_members(range(3)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "pipe:touch ran",
        "PIPE:touch ran; cat a.tar #.tar",
        "{a.tar,pipe:touch ran;}",
        "{pipe:touch ran;,a}.tar",
        "a.tar::pipe:touch ran #.tar",
        " pipe:touch ran;.tar",
        "pi\npe:touch ran;.tar",
        "https://127.0.0.1/a.tar",
        "gs://bucket/a.tar",
        "hf://datasets/x/a.tar",
        "ais://b/a.tar",
        "http://127.0.0.1/a.parquet",
        "hf:http://127.0.0.1/a",
        "simplecache::http://127.0.0.1/a.parquet",
    ],
)
def test_a_foreign_name_starts_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import webdataset

    monkeypatch.setattr(webdataset, "gopen", lambda *args, **options: pytest.fail("a program was started"))
    try:
        found = opened(Foreign(name, ORIGIN)) if not name.endswith("}") else expand(Foreign(name, ORIGIN))
        assert not any(scheme(str(url)) for url in found)
    except ValueError as refused:
        assert "expected" in str(refused)
    assert sorted(path.name for path in here.iterdir()) == ["a.tar"]


def test_the_refusal_says_where_the_name_is_from(here: Path) -> None:
    told = "data: expected local files, because the name comes from RUN/config.toml, got 'pipe:x', .*--allow-pipe"
    with pytest.raises(ValueError, match=told):
        opened(Foreign("pipe:x", ORIGIN))
    with pytest.raises(ValueError, match=told):
        opened("pipe:cat a.tar", test_data=Foreign("pipe:x", ORIGIN))


def test_a_typed_command_runs(here: Path) -> None:
    assert len(opened("pipe:touch ran; cat a.tar")) == 3
    assert (here / "ran").exists()


def test_a_foreign_path_is_read(here: Path) -> None:
    for name in ("a.tar", "{a,a}.tar", "*.tar", str(here / "a.tar"), "file:a.tar"):
        assert len(opened(Foreign(name, ORIGIN))) in (3, 6)


def test_a_file_that_is_called_like_a_command_is_a_file(here: Path) -> None:
    """Also where the pattern was typed."""
    write_tar(here / "pipe:touch ran;.tar", shard_members(range(3, 5)))
    assert len(opened("*.tar")) == 5
    assert not (here / "ran").exists()


def test_a_name_stays_foreign(tmp_path: Path) -> None:
    """From a file it is; through copies and pickles it stays so; --allow-pipe makes it the person's own."""
    from dataclasses import replace

    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\ndata = "pipe:x"\n')
    data = load_config(recipe).data
    for same in (data, replace(data, limit=3), pickle.loads(pickle.dumps(data))):
        assert isinstance(same.data, Foreign) and same.data.origin == str(recipe) and same.data == "pipe:x"
        assert not isinstance(same.test_data, Foreign)
    assert not isinstance(load_config(recipe, allow_pipe=True).data.data, Foreign)
