"""Facts about this machine and installation that a recorded number needs.

environment(("open_clip_torch",))      # {"contratile": "0.2.0", "commit": "1a2b3c4d5e", "cpu": "...", ...}
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import contratile
from contratile.host_memory import memory_bytes

GiB = 1 << 30
NOT_INSTALLED = "not installed"


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Describe the software and hardware of this process.

    Args:
        packages: Names of distributions whose versions are wanted too, as `version_NAME`.

    Returns:
        Versions, commit, number of threads, processor and memory, all as text.
    """
    facts = {
        "contratile": contratile.__version__,
        "commit": commit(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "memory_gib": f"{memory_bytes('MemTotal') / GiB:.1f}",
        "system": f"{platform.system()} {platform.machine()}",
    }
    return facts | {f"version_{name}": version(name) for name in packages}


def version(distribution: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def commit() -> str:
    """Return the commit of the running sources, with "+" if they were changed; "unknown" outside a checkout."""
    here = Path(contratile.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout

    try:
        # An installed copy may lie inside an unrelated repository that does not track it.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--", ".").strip()
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """Return the processor's model name and the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # no /proc, or no "model name" in it (ARM)
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"
