"""The rows behind `gpus.find`.

Rates per clock of NVIDIA GPUs: CUDA C++ Programming Guide, "Arithmetic instructions" (16 exp2, 32 shuffles), and four
schedulers of 32 lanes. GA100 (sm_80) has 64 fp32 lanes, the others 128. Limits per multiprocessor: the same guide,
"Technical specifications per compute capability". Product flops per clock follow from the vendors' peaks: peak =
processors * clock * flops per clock, which a test checks. AMD GPUs: CDNA 2 and CDNA 3 whitepapers and ISA guides; exp2
at a quarter of the rate of 64 lanes, shuffles as 32 lanes of LDS per clock (DPP would be faster), and one vector
instruction of 64 lanes per clock.

`sustained` is the highest bf16 rate in the table "Maximum Achievable Matmul FLOPS" of Stas Bekman's book Machine
Learning Engineering, over the peak. `l2_bandwidth` is the plateau that gpu-l2-cache of the gpu-benches suite (D. Ernst,
NHR@FAU) records, where that GPU or one with the same die is in it; otherwise the source says how it is scaled.
"""

from dataclasses import replace

from contratile.planner.gpus import Gpu, Processor

KiB, MiB, GB = 1 << 10, 1 << 20, 10**9

_GUIDE = "CUDA C++ Programming Guide"
_MAMF = "Machine Learning Engineering, matmul table"
_ASSUMED = "assumed: no published figure was verified"

SM_80 = Processor(
    arch=80,
    flops_per_clock={"16-bit": 2048, "tf32": 1024, "tf32x3": 1024 / 3, "ieee": 128},
    exp2_per_clock=16,
    shuffles_per_clock=32,
    issue_per_clock=128,
    fp32_per_clock=64,
    warp_size=32,
    registers=65536,
    threads=2048,
    blocks=32,
    shared_bytes=164 * KiB,
    shared_bytes_of_a_block=163 * KiB,
    reserved_shared_bytes=KiB,
    cluster=1,
    source=f"NVIDIA A100 whitepaper; {_GUIDE}",
)
SM_86 = replace(
    SM_80,
    arch=86,
    flops_per_clock={"16-bit": 512, "tf32": 256, "tf32x3": 256 / 3, "ieee": 256},
    fp32_per_clock=128,
    threads=1536,
    blocks=16,
    shared_bytes=100 * KiB,
    shared_bytes_of_a_block=99 * KiB,
    source=f"NVIDIA GA102 whitepaper (GeForce: half rate with fp32 accumulation); {_GUIDE}",
)
SM_89 = replace(
    SM_86,
    arch=89,
    flops_per_clock={"16-bit": 1024, "tf32": 512, "tf32x3": 512 / 3, "ieee": 256},
    blocks=24,
    source=f"NVIDIA Ada whitepaper; {_GUIDE}",
)
SM_89_GEFORCE = replace(
    SM_89,
    flops_per_clock={"16-bit": 512, "tf32": 256, "tf32x3": 256 / 3, "ieee": 256},
    source=f"NVIDIA Ada whitepaper (GeForce: half rate with fp32 accumulation); {_GUIDE}",
)
SM_90 = replace(
    SM_80,
    arch=90,
    flops_per_clock={"16-bit": 4096, "tf32": 2048, "tf32x3": 2048 / 3, "ieee": 256},
    fp32_per_clock=128,
    shared_bytes=228 * KiB,
    shared_bytes_of_a_block=227 * KiB,
    cluster=2,
    source=f"NVIDIA H100 whitepaper; {_GUIDE}",
)
SM_100 = replace(
    SM_90,
    arch=100,
    flops_per_clock={"16-bit": 8192, "tf32": 4096, "tf32x3": 4096 / 3, "ieee": 256},
    source=f"NVIDIA Blackwell datasheet; {_GUIDE}",
)
SM_120 = replace(
    SM_89_GEFORCE,
    arch=120,
    blocks=32,
    source=f"NVIDIA RTX Blackwell whitepaper (GeForce: half rate with fp32 accumulation); {_GUIDE}",
)
GFX90A = Processor(
    arch="gfx90a",
    flops_per_clock={"16-bit": 1024, "ieee": 256},
    exp2_per_clock=16,
    shuffles_per_clock=32,
    issue_per_clock=64,
    fp32_per_clock=64,
    warp_size=64,
    registers=131072,
    threads=2048,
    blocks=32,
    shared_bytes=64 * KiB,
    shared_bytes_of_a_block=64 * KiB,
    reserved_shared_bytes=0,
    cluster=1,
    source="AMD CDNA 2 whitepaper and ISA guide",
)
GFX942 = replace(
    GFX90A,
    arch="gfx942",
    flops_per_clock={"16-bit": 2048, "tf32": 1024, "ieee": 256},
    source="AMD CDNA 3 whitepaper and ISA guide",
)

_A100 = Gpu(
    name="A100-80GB",
    aliases=("A100", "A100 SXM4 80GB", "A100 SXM", "A100 PCIE 80GB", "A800", "A800 80G", "A800 SXM4 80GB"),
    processor=SM_80,
    processors=108,
    clock=1.41e9,
    sustained=0.859,
    sustained_source=f"{_MAMF}: A100 SXM 267.9 of 312",
    l2_bytes=40 * MiB,
    l2_bandwidth=5.4e12,
    l2_source="gpu-benches: 5.4 TB/s (whitepaper peak: 5120 bytes per clock, 7.2 TB/s)",
    dram_bytes=80 * GB,
    dram_bandwidth=2.039e12,
    source="NVIDIA A100 datasheet; the A800 differs only in NVLink",
)
_H100 = Gpu(
    name="H100-SXM",
    aliases=("H100", "H100 80GB HBM3", "H100 SXM5", "H100 SXM5 80GB", "H800"),
    processor=SM_90,
    processors=132,
    clock=1.83e9,
    sustained=0.801,
    sustained_source=f"{_MAMF}: H100 SXM 792.1 of 989",
    l2_bytes=50 * MiB,
    l2_bandwidth=9.7e12,
    l2_source="gpu-benches: 9.7 TB/s on an H200, which has the same die and multiprocessors",
    dram_bytes=80 * GB,
    dram_bandwidth=3.35e12,
    source="NVIDIA H100 datasheet: 989 TFLOPS at 1.83 GHz (boost up to 1.98 GHz)",
)
_ADA_L2 = "gpu-benches: 5.2 TB/s on an L40"

GPUS: tuple[Gpu, ...] = (
    _A100,
    replace(
        _A100,
        name="A100-40GB",
        aliases=("A100 SXM4 40GB", "A100 PCIE 40GB", "A800 40G", "A800 SXM4 40GB"),
        dram_bytes=40 * GB,
        dram_bandwidth=1.555e12,
    ),
    _H100,
    replace(
        _H100,
        name="H100-PCIe",
        aliases=("H100 PCIE 80GB",),
        processors=114,
        clock=1.62e9,
        sustained=0.75,
        sustained_source=_ASSUMED,
        l2_bandwidth=6.9e12,
        l2_source="gpu-benches: 6.9 TB/s",
        dram_bandwidth=2.0e12,
        source="NVIDIA H100 datasheet: 756 TFLOPS, 350 W",
    ),
    replace(
        _H100,
        name="H200",
        aliases=("H200 SXM", "H200 141GB"),
        sustained=0.803,
        sustained_source=f"{_MAMF}: H100/H200 SXM 794.5 of 989",
        l2_source="gpu-benches: 9.7 TB/s",
        dram_bytes=141 * GB,
        dram_bandwidth=4.8e12,
        source="NVIDIA H200 datasheet",
    ),
    Gpu(
        name="B200",
        aliases=("B200 SXM", "HGX B200"),
        processor=SM_100,
        processors=148,
        clock=1.855e9,
        sustained=0.776,
        sustained_source=f"{_MAMF}: B200 SXM 1745 of 2250",
        l2_bytes=126 * MiB,
        l2_bandwidth=11e12,
        l2_source="estimated: bytes per clock and multiprocessor of the H200; the vendor states nothing",
        dram_bytes=180 * GB,
        dram_bandwidth=8.0e12,
        source="NVIDIA HGX B200 datasheet: 2250 TFLOPS dense, for which the clock is computed",
    ),
    Gpu(
        name="RTX-4090",
        aliases=("4090",),
        processor=SM_89_GEFORCE,
        processors=128,
        clock=2.52e9,
        sustained=0.95,
        sustained_source=_ASSUMED,
        l2_bytes=72 * MiB,
        l2_bandwidth=4.7e12,
        l2_source=f"estimated: {_ADA_L2}, by multiprocessors and clock",
        dram_bytes=24 * GB,
        dram_bandwidth=1.008e12,
        source="NVIDIA Ada whitepaper: 165.2 TFLOPS bf16 with fp32 accumulation",
    ),
    Gpu(
        name="L4",
        aliases=("L4 24GB",),
        processor=SM_89,
        processors=58,
        clock=2.04e9,
        sustained=0.6,
        sustained_source="assumed: a limit of 72 W does not allow the boost clock in products",
        l2_bytes=48 * MiB,
        l2_bandwidth=1.75e12,
        l2_source=f"estimated: {_ADA_L2}, by multiprocessors and clock",
        dram_bytes=24 * GB,
        dram_bandwidth=0.3e12,
        source="NVIDIA L4 datasheet: 121 TFLOPS dense",
    ),
    Gpu(
        name="L40S",
        aliases=("L40S 48GB",),
        processor=SM_89,
        processors=142,
        clock=2.52e9,
        sustained=0.75,
        sustained_source=_ASSUMED,
        l2_bytes=96 * MiB,
        l2_bandwidth=5.2e12,
        l2_source=_ADA_L2,
        dram_bytes=48 * GB,
        dram_bandwidth=0.864e12,
        source="NVIDIA L40S datasheet: 366 TFLOPS dense",
    ),
    Gpu(
        name="RTX-3090",
        aliases=("3090",),
        processor=SM_86,
        processors=82,
        clock=1.695e9,
        sustained=0.9,
        sustained_source=_ASSUMED,
        l2_bytes=6 * MiB,
        l2_bandwidth=2.0e12,
        l2_source=f"estimated: {_ADA_L2}, by multiprocessors and clock",
        dram_bytes=24 * GB,
        dram_bandwidth=0.936e12,
        source="NVIDIA GA102 whitepaper: 71 TFLOPS bf16 with fp32 accumulation",
    ),
    Gpu(
        name="RTX-5090",
        aliases=("5090",),
        processor=SM_120,
        processors=170,
        clock=2.407e9,
        sustained=0.9,
        sustained_source=_ASSUMED,
        l2_bytes=96 * MiB,
        l2_bandwidth=6.0e12,
        l2_source=f"estimated: {_ADA_L2}, by multiprocessors and clock",
        dram_bytes=32 * GB,
        dram_bandwidth=1.792e12,
        source="NVIDIA RTX Blackwell whitepaper: 209.5 TFLOPS bf16 with fp32 accumulation",
    ),
    Gpu(
        name="MI300X",
        aliases=("MI300X VF", "MI300X OAM"),
        processor=GFX942,
        processors=304,
        clock=2.1e9,
        sustained=0.598,
        sustained_source=f"{_MAMF}: MI300X 781.9 of 1307, ROCm 6.2",
        l2_bytes=256 * MiB,
        l2_bandwidth=11e12,
        l2_source="estimated: 0.65 of the Infinity Cache's peak of 17.2 TB/s (the L2 of a die, 4 MB, is not counted)",
        dram_bytes=192 * GB,
        dram_bandwidth=5.3e12,
        source="AMD Instinct MI300X datasheet: 1307.4 TFLOPS dense",
    ),
    Gpu(
        name="MI250X",
        aliases=("MI250X OAM",),
        processor=GFX90A,
        processors=110,
        clock=1.7e9,
        sustained=0.767,
        sustained_source=f"{_MAMF}: MI250X 147.0 of 191.5, one die",
        l2_bytes=8 * MiB,
        l2_bandwidth=4.4e12,
        l2_source="gpu-benches: 4.2 to 5.1 TB/s on an MI210, which is one such die",
        dram_bytes=64 * GB,
        dram_bandwidth=1.6e12,
        source="AMD Instinct MI250X datasheet; one of its two dies, as PyTorch sees it: 191.5 TFLOPS",
    ),
)
"""Variants of a GPU: the one that a bare name means comes first."""
