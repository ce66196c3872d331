"""Runs examples in forks of one process that has imported their packages, each of which takes seconds to import.

    python -m tests.example_runner          # a line of standard input: ["examples/lightly_simclr.py", "200"]

For each line it prints a line of JSON: the exit code and what the example printed.
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


def run(words: list[str]) -> tuple[int, str]:
    """Run a script in a fork, whose state nobody else sees."""
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if not pid:
            _run_here(words, said.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return code, said.read()


def _run_here(words: list[str], output: int) -> None:
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
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
