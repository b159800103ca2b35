"""What ebb did."""

from __future__ import annotations

from typing import Any

from ebb import _C
from ebb._report import planned


def stats(flat: bool = False) -> dict[str, Any]:
    """What the last step did, by region and in total, and what is alive now.

    A step begins when an outermost region is entered after a backward, so after a backward the
    figures are those of the last forward and backward.

    Args:
        flat: give one level of floats for a logger instead: the step, the totals, the sums of
            transfers, and what is alive, as ``{"ebb/bytes_saved": 1024.0, ...}``.

    Returns:
        A dictionary with

        * ``"step"``: steps begun since the start or the last :func:`reset_stats`;
        * ``"regions"``: for each region name a dictionary of counts; ``"total"``: their sum:
          ``entered`` (times), ``ops_seen`` (views are not), ``ops_recorded``, ``ops_replayed``,
          ``ops_replayed_ahead`` (before backward asked: :func:`ebb.ahead.configure`),
          ``bytes_saved`` (made in the region and kept, each storage once: for autograd, or for
          replays that read it), ``bytes_packed`` (the part of it that autograd packed),
          ``bytes_dropped`` (packed by autograd, and not kept), ``bytes_copied`` (copied before
          a write because a recompute needs them), ``bytes_offloaded`` (sent to the host),
          ``bytes_fell_back`` (were to be offloaded, and were kept or recomputed for want of host
          memory), ``bytes_paged`` (of storages whose live rows went to pages),
          ``bytes_not_paged`` (were to be paged, and were kept: which rows live is not known),
          ``bytes_escaped`` (dropped by ebb and read inside
          the region, but still held by somebody when it ended), ``bytes_from_outside`` (made
          outside of the outermost region, kept for its backward, and held by nobody else in the
          end);
        * ``"transfers"``: for each region name, for each op whose values were to be offloaded
          (``"input"`` for inputs), in bytes: ``bytes_offloaded``, ``bytes_reloaded``,
          ``bytes_waited_host`` (of copies that the host waited for), ``bytes_waited_device``
          (needed before the copy back was done), ``bytes_fell_back``, ``bytes_spilled`` (moved on
          to disk);
        * ``"demoted_ops"``: operators that :class:`ebb.verify` found must be saved;
        * ``"live_recipes"``, ``"live_handles"``, ``"open_regions"``: objects that exist now, in
          the whole process;
        * ``"ahead"``: what replays ahead did since the process began, and what is there now:
          ``regions_in_time`` (replayed before backward reached them), ``regions_late`` (backward
          came meanwhile, and did the rest), ``regions_in_vain`` (backward never came),
          ``regions_held`` (last regions, which were not given up), ``regions_stopped`` (left to
          backward in part, see docs/how-to/replay-ahead.md), ``failures`` (replays that raised an
          exception; backward runs them again, and raises it), ``bytes``, ``most_bytes`` (there
          before backward needs them, now and at most), ``workers`` (threads, now);
        * ``"offload"``: likewise for OFFLOAD: ``bytes_sent``, ``bytes_fetched`` (copied to the
          host, and back), ``bytes_refused`` (not sent, for want of host memory), ``host_waits``
          (times the host waited for a copy), ``fetched_late`` (fetches that began only when the
          bytes were needed), ``most_in_flight``, ``in_flight_bytes`` (on their way to the host, at
          most and now), ``host_bytes_held``, ``host_bytes_used`` (pinned memory now, in use or not,
          and in use), ``stashes`` (values that are away now), ``bytes_spilled``,
          ``disk_bytes_used`` (moved on from pinned memory to disk, and taken there now);
        * ``"paging"``: likewise for PAGE: ``steps``; ``recorded_steps`` (those that ran without
          pools, with the host waiting for each count); ``overflows`` (steps that found too little
          room); ``spilled_steps`` (how often :func:`ebb.paging.step_ok` found rows in the second
          tier); ``stashed`` (values), ``resident`` (those of them that stayed where they were,
          since their backward came next), ``stashes`` (values that are away now);
          ``padded_bytes``, ``live_bytes`` (the most that the recorded step had away at a time, with
          and without dead rows); ``pool_bytes``, ``host_pool_bytes`` (what pools have now, on
          devices and in pinned memory); ``pools`` (each pool's ``device``, ``dtype``,
          ``row_bytes``, ``page_rows``, ``device_pages``, ``host_pages``, ``stack``: rows come back
          in the reverse order, so no table of pages is needed, and ``bytes``); ``schedule`` (the
          entries of the step that :func:`ebb.paging.step` recorded, in words).

    Example:
        >>> ebb.stats()["open_regions"]
        0
    """
    found = _C.stats()
    if flat:
        return _flat(found)
    return found | {
        "ahead": _C.ahead_stats(),
        "offload": _C.offload_stats(),
        "paging": _C.paging_stats(),
    }


def _flat(found: dict[str, Any]) -> dict[str, float]:
    numbers = dict(found["total"])
    for operators in found["transfers"].values():
        for transfers in operators.values():
            for name in ("bytes_reloaded", "bytes_waited_host", "bytes_waited_device"):
                numbers[name] = numbers.get(name, 0) + transfers[name]
    for name in ("step", "live_recipes", "live_handles", "open_regions"):
        numbers[name] = found[name]
    return {f"ebb/{name}": float(number) for name, number in numbers.items()}


def reset_stats() -> None:
    """Set the counters of :func:`stats` to zero; what is alive stays counted."""
    _C.reset_stats()
    planned.steps_are_renumbered()
