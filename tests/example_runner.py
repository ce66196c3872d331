"""Runs examples in forks of one process that has imported their packages, each of which takes seconds to import.

    python -m tests.example_runner          # a line of standard input: ["examples/lightly_simclr.py", "200"]

For each line it prints a line of JSON: the exit code, what the example printed, and what it said to standard error.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.torchvision_repair import repair_torchvision

PACKAGES = ("contratile", "transformers", "sentence_transformers.trainer", "open_clip", "lightning", "accelerate")


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a script in a fork, whose state nobody else sees."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            _run_here(words, printed.fileno(), errors.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed.seek(0)
        errors.seek(0)
        return code, printed.read(), errors.read()


def _run_here(words: list[str], output: int, errors: int) -> None:
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    repair_torchvision()
    for package in PACKAGES:
        with suppress(ImportError):
            import_module(package)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
