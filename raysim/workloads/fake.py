"""Runs on fake tensors, which have a shape and no values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def fake(mode: FakeTensorMode) -> Iterator[None]:
    """Enter a mode of fake tensors, in which an operation that fails raises its error only: torch also logs a traceback."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = before
