"""Messages about options that do not exist, with the nearest one that does.

unknown_option("--batchsize", ["--batch", "--chunk"])      # 'unknown option --batchsize. Did you mean --batch?'
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

ELSEWHERE = {
    "--accum-freq": "--chunk",
    "--aug-cfg": "--augment",
    "--batch-size": "--batch",
    "--dataset": "--data",
    "--distill-model": "--teacher",
    "--distill-pretrained": "--teacher",
    "--imagenet-val": "--zero-shot",
    "--learning-rate": "--lr",
    "--logs": "--out",
    "--loss-type": "--loss",
    "--mini-batch-size": "--chunk",
    "--model": "--towers",
    "--name": "--out",
    "--num-workers": "--workers",
    "--output-dir": "--out",
    "--per-device-train-batch-size": "--batch",
    "--pretrained": "--towers",
    "--report-to": "--track",
    "--temperature": "--init-scale",
    "--train-data": "--data",
    "--train-num-samples": "--samples-per-epoch",
    "--val-data": "--test-data",
    "--warmup-steps": "--warmup",
    "--wd": "--weight-decay",
}
"""Options of open_clip, sentence-transformers and transformers, and our option that does the same."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that names the nearest option when one does not exist.

    Attributes:
        words: Name of an argument with nargs="*" that may also stand after options, where argparse does not find it.
    """

    words = ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        known = [name for action in self._actions for name in action.option_strings]
        for word in rest:
            if word.startswith("-"):
                self.error(unknown_option(word, known))
        if self.words and not getattr(found, self.words):
            setattr(found, self.words, rest)
        elif rest:
            self.error(f"unexpected {' '.join(rest)!r}. See `{self.prog} --help`")
        return found


def unknown_option(word: str, known: Iterable[str]) -> str:
    """Return the error message for an option that does not exist."""
    name = word.partition("=")[0].replace("_", "-")
    known = list(known)
    if ELSEWHERE.get(name) in known:
        return f"unknown option {word.partition('=')[0]}. Did you mean {ELSEWHERE[name]}?"
    close = difflib.get_close_matches(name, list(known), n=1)
    # difflib finds --batchsize too far from --batch; a common beginning counts more.
    begins = sorted((x for x in known if len(x) > 3 and (name.startswith(x) or x.startswith(name))), key=len)
    near = begins[-1:] or close
    hint = f"Did you mean {near[0]}?" if near else "See --help for all."
    return f"unknown option {word.partition('=')[0]}. {hint}"


def options_of(config: Any) -> list[str]:
    """Return the options of a command that takes the fields of a dataclass, or of the dataclasses in it."""
    found: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += options_of(value)
        else:
            dashed = field.name.replace("_", "-")
            found += [f"--{dashed}", *([f"--no-{dashed}"] if isinstance(value, bool) else [])]
    return found


def check_options(command: str, argv: Sequence[str], known: Sequence[str]) -> None:
    """Exit with an error message if a word is an option that does not exist."""
    for word in argv:
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and len(word) > 2 and name not in (*known, "--help"):
            _end(f"contratile {command}: {unknown_option(word, known)}")


def _end(text: str) -> NoReturn:
    from contratile.printable import printable

    print(printable(text), file=sys.stderr)
    raise SystemExit(2)
