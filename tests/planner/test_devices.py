"""Devices as a user types them."""

import pytest

from contratile.planner.devices import parse_devices


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gpu"),
    [
        ("H100", 1, 1, "H100-SXM"),
        ("8xA800-80G", 1, 8, "A800-80GB"),
        ("4x8xH100", 4, 8, "H100-SXM"),
        ("2 x 4 x a100 40gb", 2, 4, "A100-40GB"),
    ],
)
def test_names(text: str, nodes: int, per_node: int, gpu: str) -> None:
    found = parse_devices(text)
    assert (found.nodes, found.per_node) == (nodes, per_node)
    assert found.gpu is not None and found.gpu.name == gpu and found.memory == found.gpu.dram_bytes
    assert found.usable == found.memory - found.reserve
    assert found.flops["bf16"] > found.flops["fp32"]


def test_what_is_passed_replaces_the_table() -> None:
    found = parse_devices("8xA800-80G", memory=40e9, flops=1e14, link=1e9, host_memory=5e11)
    assert (found.memory, found.flops["fp32"], found.link, found.host_memory) == (40e9, 1e14, 1e9, 5e11)


def test_devices_by_hand() -> None:
    found = parse_devices("4x8", memory=40e9, flops=1e14)
    assert found.count == 32 and found.gpu is None and found.memory == 40e9


def test_links_differ_between_a100_and_a800() -> None:
    assert parse_devices("A100").link == 1.5 * parse_devices("A800").link


def test_processes_share_a_cpu() -> None:
    one, two = parse_devices("cpu", memory=8e9), parse_devices("2xcpu", memory=4e9)
    assert one.on_cpu and two.count == 2
    assert (one.memory, two.memory, two.host_memory) == (8e9, 4e9, 8e9)
    assert two.flops["fp32"] == pytest.approx(one.flops["fp32"] / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"devices: expected \[NODESx\]\[DEVICESx\]NAME, got ''"),
        ("0xH100", "devices: expected at least one device"),
        ("8xV100", "gpu: expected one of A100-80GB"),
        ("8", "devices: expected a name, or a device by hand, got a number without --device-memory"),
        ("2x3x4", "devices: expected at least one device"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(text)


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="device memory: expected a positive number, got -1"):
        parse_devices("H100", memory=-1)
