"""Names of the hub: a path that is not there is told at once, and without a network nobody waits."""

import socket
from pathlib import Path
from typing import Any

import pytest

from contratile.data import hub_names
from contratile.data.hub import open_hub
from contratile.data.hub_names import found_at_hub, reachable, why_not_found


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As on a machine that is not set to be offline; connections fail and are noted."""
    import huggingface_hub.constants as constants

    asked: list[Any] = []

    def refuse(address: Any, **options: Any) -> None:
        asked.append(address)
        raise OSError("unreachable")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub_names, "getproxies", dict)
    return asked


@pytest.mark.parametrize("name", ["./none", "../none", "a/b/c", "/none/here", "~/none", "none/", "nö/ne", "a b"])
def test_a_path_that_is_not_there(name: str, online: list[Any]) -> None:
    with pytest.raises(ValueError, match="data: expected a folder, got nothing at"), found_at_hub(name, "data"):
        pass
    assert not online, "nobody was asked"


def test_without_a_network_the_cache_is_used(online: list[Any]) -> None:
    import huggingface_hub.constants as constants

    with found_at_hub("org/none", "data") as folder:
        assert folder is None and constants.HF_HUB_OFFLINE
        assert (
            why_not_found("org/none")
            == "'org/none', which is not a local folder, and the Hugging Face hub cannot be reached"
        )
    assert not constants.HF_HUB_OFFLINE and online == [("huggingface.co", 443)]
    with pytest.raises(
        ValueError, match="expected a folder or a dataset of the hub, got 'org/none', which is not a local folder"
    ):
        open_hub("hf:org/none", "train")


def test_who_can_be_asked(monkeypatch: pytest.MonkeyPatch, online: list[Any], tmp_path: Path) -> None:
    with found_at_hub(str(tmp_path), "data") as folder:
        assert folder == tmp_path and not online
    assert not reachable()
    monkeypatch.setattr(hub_names, "getproxies", lambda: {"https": "http://proxy"})
    assert reachable(), "behind a proxy nobody knows"
    monkeypatch.setattr(hub_names, "getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: socket.socket())
    assert reachable()
