"""The table of GPUs: names, peaks and limits."""

import dataclasses

import pytest

from contratile.engine.backends.triton_configs import TABLE
from contratile.planner.gpus import Gpu, Processor, all_gpus, find

NAMES = [
    ("A100", "A100-80GB"),
    ("a100 40gb", "A100-40GB"),
    ("A800-80G", "A800-80GB"),
    ("h100", "H100-SXM"),
    ("h100_pcie", "H100-PCIe"),
    ("rtx4090", "RTX-4090"),
    ("mi300x", "MI300X"),
]
DEVICE_NAMES = [
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
    ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA A100 80GB PCIe", "A100-80GB"),
    ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
    ("NVIDIA H100 80GB HBM3", "H100-SXM"),
    ("NVIDIA H100 PCIe", "H100-PCIe"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090"),
    ("NVIDIA L4", "L4"),
    ("NVIDIA L40S", "L40S"),
    ("AMD Instinct MI300X", "MI300X"),
    ("AMD Instinct MI250X / MI250", "MI250X"),
]
PEAKS = {
    "A100-80GB": (312, 156, 19.5),
    "H100-SXM": (989, 494.7, 61.8),
    "H100-PCIe": (756, 378, None),
    "H200": (989, 494.7, 61.8),
    "B200": (2250, 1125, None),
    "RTX-4090": (165.2, 82.6, 82.6),
    "L4": (121, 60.5, 30.3),
    "L40S": (366, 183, 91.6),
    "RTX-3090": (71, 35.6, 35.6),
    "RTX-5090": (209.5, 104.8, 104.8),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI250X": (191.5, None, 47.9),
}
"""Dense TFLOP/s of the vendors: 16 bit, TF32, fp32."""


@pytest.mark.parametrize(("name", "expected"), NAMES + DEVICE_NAMES)
def test_found_by_typed_name_and_device_name(name: str, expected: str) -> None:
    assert find(name).name == expected


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_name_finds_its_entry(gpu: Gpu) -> None:
    for name in (gpu.name, *gpu.aliases, gpu.name.lower(), f"NVIDIA {gpu.name}"):
        assert find(name) is gpu


def test_names_are_unique() -> None:
    names = [name.lower() for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["L40", "V100", "", "H1000"])
def test_an_unknown_gpu_names_those_that_exist(name: str) -> None:
    """A name that only begins like another one is not taken for it."""
    with pytest.raises(ValueError, match=r"gpu: expected one of A100-80GB, .*MI250X, got .* Describe another one"):
        find(name)


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_the_vendors(name: str) -> None:
    gpu = find(name)
    for kind, peak in zip(("16-bit", "tf32", "ieee"), PEAKS[name], strict=True):
        if peak is not None:
            assert gpu.peak(kind) / 1e12 == pytest.approx(peak, rel=0.01), kind


@pytest.mark.parametrize("arch", TABLE)
def test_every_architecture_of_the_launch_table_has_a_gpu(arch: object) -> None:
    mine = [gpu for gpu in all_gpus() if gpu.arch == arch]
    assert mine
    for gpu in mine:
        assert set(gpu.processor.flops_per_clock) == set(TABLE[gpu.arch])


def test_a_missing_kind_runs_as_ieee() -> None:
    gpu = find("MI250X")
    assert gpu.kind("tf32") == "ieee" and gpu.peak("tf32") == gpu.peak("ieee")


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_figures_are_plausible_and_have_sources(gpu: Gpu) -> None:
    assert 0.5 <= gpu.sustained <= 1
    assert gpu.dram_bandwidth < gpu.l2_bandwidth
    assert gpu.l2_bytes < gpu.dram_bytes
    assert gpu.processor.shared_bytes_of_a_block <= gpu.processor.shared_bytes
    for text in (gpu.source, gpu.l2_source, gpu.sustained_source, gpu.processor.source):
        assert text and "http" not in text


@pytest.mark.parametrize("cls", [Gpu, Processor])
def test_records_are_frozen_and_keyword_only(cls: type) -> None:
    assert all(field.kw_only for field in dataclasses.fields(cls))
    with pytest.raises(dataclasses.FrozenInstanceError):
        find("L4").name = "L5"  # type: ignore[misc]  # the assignment is what is tested
