"""docs/cli.md: every option of every command, as the commands have them now."""

import re
from pathlib import Path

import pytest

from contratile.cli import COMMANDS, Command, main
from contratile.cli.reference import chapter, page

OPTION = r"(?:^ *|, )(--[a-z][a-z-]*)"
"""An option at the beginning of a line of the help, and its other names."""
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_options_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m contratile.cli.reference > docs/cli.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_page_names_the_options_of_the_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.name.split(), "--help"])
    told = re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out)
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told))  # prose may mention options of other commands
    listed = {name for line in told.splitlines() if line.strip().startswith("-") for name in re.findall(OPTION, line)}
    written = re.findall(r"^\| (.*?) \|", chapter(command), re.MULTILINE)
    assert listed - {"--help"} <= set(re.findall(r"`(--[a-z-]+)`", " ".join(written))) <= mentioned
