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
          the whole process.

    Example:
        >>> ebb.stats()["open_regions"]
        0
    """
    found = _C.stats()
    return _flat(found) if flat else found


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
