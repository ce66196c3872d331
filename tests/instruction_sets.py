"""The numerical tests under other instruction sets and numbers of threads, as far as this CPU has them.

    python -m tests.instruction_sets                    # every setting below, one after the other
    python -m tests.instruction_sets --only avx2 -- tests/engine/test_autograd.py -k scale

Sums are rounded in the order that vector registers and threads give them: a test that passes under one setting only
holds a rounding error to one machine's luck. ATen's own loops follow ATEN_CPU_CAPABILITY, oneDNN's follow
ONEDNN_MAX_CPU_ISA, and MKL's products MKL_ENABLE_INSTRUCTIONS, which MKL heeds on Intel's CPUs only; on others it heeds
MKL_CBWR=COMPATIBLE. A setting that the CPU lacks is passed over by these libraries, not refused.
"""

import argparse
import os
import re
import subprocess
import sys

FILES = [
    "tests/test_reference.py",
    "tests/test_metrics.py",
    *(f"tests/engine/test_{name}.py" for name in ("autograd", "stats", "rule", "classes", "reserve")),
    *(f"tests/losses/test_{name}.py" for name in ("losses", "family", "exact", "devices", "fuzz")),
    "tests/grad_cache/test_cache.py",
    "tests/integrations/test_integrations.py",
    "tests/engine/kernels/test_interpreted.py",
]

SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "2-threads": {"CONTRATILE_TEST_THREADS": "2", "OMP_NUM_THREADS": "2"},
    "4-threads": {"CONTRATILE_TEST_THREADS": "4", "OMP_NUM_THREADS": "4"},
}


def run(name: str, arguments: list[str]) -> bool:
    """Print one line for a setting, and what failed; whether nothing did."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--numprocesses=logical",
        "--maxprocesses=4",
        "-m",
        "not slow",
        *arguments,
    ]
    done = subprocess.run(words, env=os.environ | SETTINGS[name], capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    print(f"{name:15}  {last}", *re.findall(r"^(?:FAILED|ERROR).*$", done.stdout, re.M), sep="\n    ", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The numerical tests under other instruction sets and threads.")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("arguments", nargs="*", help="of pytest, after --; by default the numerical test files")
    options = parser.parse_args()
    passed = [run(name, options.arguments or FILES) for name in options.only]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
