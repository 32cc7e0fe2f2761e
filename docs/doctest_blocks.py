"""An extension of griffe: the doctests of docstrings become blocks of code on the pages of the API."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Puts fences around doctests."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around the doctests of a docstring."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
