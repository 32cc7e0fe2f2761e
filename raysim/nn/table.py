"""Printable tables of messages."""

from __future__ import annotations

import pandas as pd


class MessageTable(pd.DataFrame):
    """A DataFrame that prints with all of its columns, also in a narrow terminal."""

    @property
    def _constructor(self) -> type[MessageTable]:
        return MessageTable

    def __repr__(self) -> str:
        return self.to_string(max_rows=pd.get_option("display.max_rows"))
