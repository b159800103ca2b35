"""Counters of the last step and of the process."""

from __future__ import annotations

from typing import Any

from ebb import _C
from ebb._report import planned


def stats(flat: bool = False) -> dict[str, Any]:
    """Return counters of the last step, by region and in total, and of objects alive now.

    A step begins when an outermost region is entered after a backward. After a backward the
    counters are thus those of the last forward and backward.

    Args:
        flat: return one level of floats for a logger instead: the step, the totals, the sums of
            transfers, and the objects alive, as ``{"ebb/bytes_saved": 1024.0, ...}``.

    Returns:
        A dictionary with

        * ``"step"``: steps begun since the start or the last :func:`reset_stats`;
        * ``"regions"``: for each region name a dictionary of counters; ``"total"``: their sum:
          ``entered`` (times), ``ops_seen`` (without views), ``ops_recorded``, ``ops_replayed``,
          ``ops_replayed_ahead`` (before backward needed them: :func:`ebb.ahead.configure`),
          ``bytes_saved`` (computed in the region and resident for autograd or for replays; each
          storage counts once), ``bytes_packed`` (the part of ``bytes_saved`` that autograd packed),
          ``bytes_dropped`` (packed by autograd, and freed), ``bytes_copied`` (copied before
          a write because a replay needs them), ``bytes_offloaded`` (copied to the host),
          ``bytes_fell_back`` (OFFLOAD bytes that were saved or recomputed because host memory was
          full), ``bytes_paged`` (of storages whose valid rows went to pages),
          ``bytes_not_paged`` (PAGE bytes that were saved because their valid rows are not known),
          ``bytes_escaped`` (recomputable and read inside the region, but still referenced by the
          program when the region ended), ``bytes_from_outside`` (computed outside of the outermost
          region, kept for its backward, and referenced only by ebb when freed);
        * ``"transfers"``: for each region name, for each op with the decision OFFLOAD
          (``"input"`` for inputs), in bytes: ``bytes_offloaded``, ``bytes_reloaded``,
          ``bytes_waited_host`` (of copies that the host waited for), ``bytes_waited_device``
          (bytes whose copy back had not finished when backward needed them),
          ``bytes_fell_back``, ``bytes_spilled`` (moved on to disk);
        * ``"demoted_ops"``: operators whose outputs ebb saves since :class:`ebb.verify` found a
          difference;
        * ``"live_recipes"``, ``"live_handles"``, ``"open_regions"``: objects that exist now, in
          the whole process;
        * ``"ahead"``: replays ahead, since the process began or now:
          ``regions_in_time`` (replayed before backward reached them), ``regions_late`` (backward
          reached them during the replay and recomputed the rest), ``regions_in_vain`` (backward
          never reached them), ``regions_held`` (last regions, which were not freed),
          ``regions_stopped`` (replayed in part, see docs/how-to/replay-ahead.md), ``failures``
          (replays that raised an exception; backward runs them again and raises it), ``bytes``,
          ``most_bytes`` (resident before backward needs them, now and at most), ``workers``
          (threads, now);
        * ``"offload"``: OFFLOAD, likewise: ``bytes_sent``, ``bytes_fetched`` (copied to the
          host, and back), ``bytes_refused`` (not sent because host memory was full), ``host_waits``
          (times the host waited for a copy), ``fetched_late`` (fetches that began only when the
          bytes were needed), ``most_in_flight``, ``in_flight_bytes`` (in flight to the host, at
          most and now), ``host_bytes_held``, ``host_bytes_used`` (pinned memory now: allocated, and
          in use), ``stashes`` (values that are offloaded now), ``bytes_spilled``,
          ``disk_bytes_used`` (moved on from pinned memory to disk, and on disk now);
        * ``"paging"``: PAGE, likewise: ``steps``; ``recorded_steps`` (steps without
          pools, in which the host waits for each row count); ``overflows`` (steps for which a pool
          was too small); ``spilled_steps`` (how often :func:`ebb.paging.step_ok` found rows in the
          second tier); ``stashed`` (values), ``resident`` (the part of ``stashed`` that stayed in
          place because its backward came next), ``stashes`` (values that are paged now);
          ``padded_bytes``, ``live_bytes`` (peak bytes of paged values in the recorded step, with
          and without padding rows); ``pool_bytes``, ``host_pool_bytes`` (size of the
          pools now, on devices and in pinned memory); ``pools`` (each pool's ``device``, ``dtype``,
          ``row_bytes``, ``page_rows``, ``device_pages``, ``host_pages``, ``stack``: True if rows
          come back in reverse order, so that no page table is needed, and ``bytes``); ``schedule``
          (the entries of the step that :func:`ebb.paging.step` recorded, in words).

    Examples:
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
    """Set the counters of :func:`stats` to zero. Objects alive stay counted."""
    _C.reset_stats()
    planned.steps_are_renumbered()
