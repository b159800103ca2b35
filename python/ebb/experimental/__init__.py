"""Features that may change, because no GPU has run them yet: ``ebb.experimental.paging``, and
freeing a region's result until backward."""

from __future__ import annotations

from ebb._region.placeholder import PlaceholderError, discard, discardable
from ebb.experimental import paging
from ebb.experimental.paging._agreement import PageOverflowError
from ebb.experimental.paging._steps import mark_rows

__all__ = ["PageOverflowError", "PlaceholderError", "discard", "discardable", "mark_rows", "paging"]
