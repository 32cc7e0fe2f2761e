"""A console for untrusted texts: printed literally, with control characters replaced."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from raysim.notation import printable


class PlainConsole(Console):
    """A console without markup, emoji codes, highlights and control characters; `width` applies to a file or a pipe."""

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if width is not None and not self.is_terminal:
            self.width = width

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Return a line with a spinner."""
        return super().status(Text(printable(status)) if isinstance(status, str) else status, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text without markup, whatever the options."""
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})
