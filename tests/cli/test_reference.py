"""docs/cli.md: every option of every command, as the commands have them now."""

import re
from pathlib import Path

import pytest

from contratile.cli import COMMANDS, Command, main
from contratile.cli.reference import chapter, page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_what_the_options_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m contratile.cli.reference > docs/cli.md"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_page_names_the_options_of_the_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.name.split(), "--help"])
    told = re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out)
    of_others = {"--help", "--nproc-per-node"}  # the second is torchrun's, in an example
    expected = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told)) - of_others
    written = re.findall(r"^\| (.*?) \|", chapter(command), re.MULTILINE)
    assert set(re.findall(r"`(--[a-z-]+)`", " ".join(written))) == expected
