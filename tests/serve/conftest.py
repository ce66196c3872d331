"""Small runs to serve, and a server in a thread."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contratile.report.gallery import Gallery
from contratile.report.gallery_corpus import GalleryCorpus
from contratile.serve import Finder, Server, load_finder, make_server
from contratile.train import Trainer, write_results
from tests.train.runs import sentence_folder, shapes, small, texts


def gallery_of(finder: Finder) -> Gallery:
    """The gallery that a finder searches."""
    assert isinstance(finder.corpus, GalleryCorpus)
    return finder.corpus.gallery


@pytest.fixture(scope="session")
def pictures_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on pictures and texts whose gallery holds all pairs."""
    folder = tmp_path_factory.mktemp("served")
    trainer = Trainer(small(shapes(folder / "shapes"), folder / "run"))
    write_results(trainer, trainer.run())
    return folder / "run"


@pytest.fixture(scope="session")
def pictures(pictures_run: Path) -> Finder:
    return load_finder(pictures_run)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Finder:
    """A run on pairs of texts."""
    folder = tmp_path_factory.mktemp("served-texts")
    towers = f"st:{sentence_folder(folder / 'model')}"
    trainer = Trainer(small(texts(folder), folder / "run", towers=towers, pixels=0, lr=None, steps=2, gallery="all"))
    write_results(trainer, trainer.run())
    return load_finder(folder / "run")


@pytest.fixture(scope="session")
def views(pictures_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Finder:
    """A run on two views of pictures."""
    folder = tmp_path_factory.mktemp("served-views")
    trainer = Trainer(small(pictures_run.parent / "shapes", folder / "run", loss="ntxent", views=2, gallery="all"))
    write_results(trainer, trainer.run())
    return load_finder(folder / "run")


@pytest.fixture
def serving() -> Iterator[Callable[[Finder], Server]]:
    """Start servers on free ports; they end with the test."""
    started: list[tuple[Server, threading.Thread]] = []

    def start(finder: Finder) -> Server:
        server = make_server(finder, port=0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()
