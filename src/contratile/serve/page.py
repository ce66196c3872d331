"""The page of `contratile serve`: one file with its style and script inside, and the policy that allows only these.

page, policy = make_page(finder, limit=1 << 24)
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from string import Template

from contratile.printable import printable
from contratile.report.sheets import shortened
from contratile.serve.finder import Finder

FOLDER = Path(__file__).parent
EXAMPLE = 60
"""Characters of the example in the search field at most."""


def make_page(finder: Finder, *, limit: int) -> tuple[bytes, str]:
    """Fill in the page for a corpus.

    Args:
        finder: What the page searches.
        limit: Size of a picture in bytes that the server accepts at most.

    Returns:
        The page, and its Content-Security-Policy.
    """
    style, script = (FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    both_ways = not finder.takes_pictures and len(finder.corpus.searchable) == 2
    left, right = finder.corpus.sides
    example = shortened(printable(finder.example()), EXAMPLE)
    values = {
        "title": finder.title,
        "counts": finder.corpus.counts(),
        "remark": f"Pictures are missing: {finder.corpus.remark}",
        "text_label": "Text",
        "left": f"{left} (left)" if left == right else left,
        "right": f"{right} (right)" if left == right else right,
        "takes_text": "yes" if finder.takes_text else "no",
        "takes_pictures": "yes" if finder.takes_pictures else "no",
        "limit": str(limit),
        "example": f"for example: {example}" if example else "",
    }
    escaped = {name: escape(printable(value), quote=True) for name, value in values.items()}
    hidden = {
        "among_hidden": "" if both_ways else "hidden",
        "remark_hidden": "" if finder.corpus.remark else "hidden",
        "split_hidden": "" if finder.corpus.has_splits else "hidden",
    }
    template = Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    page = template.substitute(escaped, **hidden, style=style, script=script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src 'self' blob: data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
