"""What the paging engine did."""

from __future__ import annotations

from typing import Any

from ebb import _C


def stats() -> dict[str, Any]:
    """What the paging engine did since the process began, and what it has now.

    Returns:
        A dictionary with

        * ``steps``; ``recorded_steps``: those that ran without pools, with the host waiting for
          each count; ``overflows``: steps that found too little room; ``spilled_steps``: how often
          :func:`step_ok` found rows in the second tier;
        * ``stashed``: values; ``resident``: those of them that stayed where they were, since their
          backward came next; ``stashes``: values that are away now;
        * ``padded_bytes``, ``live_bytes``: the most that the recorded step had away at a time, with
          and without dead rows;
        * ``pool_bytes``, ``host_pool_bytes``: what pools have now, on devices and in pinned memory;
        * ``pools``: each pool's ``device``, ``dtype``, ``row_bytes``, ``page_rows``,
          ``device_pages``, ``host_pages``, ``stack`` (rows come back in the reverse order, so no
          table of pages is needed) and ``bytes``;
        * ``schedule``: the entries of the step that :func:`step` recorded, in words.
    """
    return _C.paging_stats()
