"""A headless Chromium for the tests: the machine's own, or Debian's packages unpacked beside the environment.

    screenshot(page, picture, dark=True)

Nothing is installed: `apt-get` says which packages are missing and downloads them, checking their signatures, and they
are unpacked into a folder of the virtual environment. That needs no rights; Debian and its kin only.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(sys.prefix) / "chromium"


class NoBrowser(Exception):
    """Why there is none."""


def chromium() -> tuple[list[str], dict[str, str]]:
    """The command and the variables that it needs."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return [found], {}
    if not CACHE.exists():
        fetch(CACHE)
    libraries = sorted({str(path.parent) for path in CACHE.rglob("*.so*")})
    return [str(CACHE / "usr/lib/chromium/chromium")], {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def fetch(folder: Path) -> None:
    """Unpack Chromium and what it lacks here into the folder, which appears when it is complete."""
    draft = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    downloads = draft / "downloads"
    downloads.mkdir(parents=True)
    try:
        plan = _run("apt-get", "install", "--simulate", "--no-install-recommends", "chromium")
        packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        _run("apt-get", "download", *packages, cwd=downloads)
        for package in sorted(downloads.glob("*.deb")):
            _run("dpkg-deb", "--extract", str(package), str(draft))
        shutil.rmtree(downloads)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _run(*words: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600, check=True)
    except FileNotFoundError as error:
        raise NoBrowser(f"no chromium and no {words[0]}: install Chromium") from error
    except subprocess.CalledProcessError as error:
        raise NoBrowser(f"no chromium, and {' '.join(words[:2])} says: {error.stderr.strip()[-300:]}") from error
    return done.stdout


def screenshot(page: Path, picture: Path, *, dark: bool) -> None:
    """Open a page of this machine, without any network, and take its picture."""
    command, variables = chromium()
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    # As root, in containers, there is no sandbox to be had; the page is our own.
    quiet = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars".split()
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={picture.parent / 'profile'}"]
    words = [*command, *quiet, *offline, scheme, "--window-size=1200,2400", f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and picture.exists(), done.stderr
