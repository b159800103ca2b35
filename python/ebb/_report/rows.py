"""The rows of a report: storages that are alike, and their fate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ebb._support.names import ranges, template
from ebb._support.renamed import Renamed

FATES = {
    "saved": "kept on the device: the policy says so",
    "kept": "kept though the policy would recompute it, or made outside and held by ebb alone",
    "recomputed": "dropped in the forward, made again in backward",
    "offloaded": "moved to host memory, fetched in backward",
    "paged": "its live rows moved to a page pool, and back in backward",
    "escaped": "could be dropped, but the program (a cache, an attribute, an output) still held it",
    "result": "held by the program when the region ended, and not for its backward",
    "copied": "a copy, made because a replay needs what a write was about to change",
    "outside": "made outside of the region (inputs, parameters): held by others or in another row",
    "unneeded": "made again on the way to something else; held by nobody",
}
# Fates of memory that was allocated in the region and is on the device when the region ends.
HELD = ("saved", "kept", "escaped", "copied", "result")


@dataclass(frozen=True)
class Row:
    """Storages that are alike: same region, module, operator, shape, fate, rule and stack.

    Attributes:
        region: the region that computed them.
        module: the innermost running module, if it is known.
        op: the operator that computed them, or ``"from outside"``.
        shape: shape of the operator's result.
        dtype: dtype of the operator's result, such as ``"float32"``.
        fate: what happened to them; a key of ``Report.FATES``.
        rule: the rule that matched.
        reason: why they were kept although the policy says otherwise.
        count: the number of storages.
        bytes: the bytes of all storages together.
        eager: the part of ``bytes`` that eager would save for backward.
        replays: the number of recomputed results.
        replays_ahead: the part of ``replays`` that ran before backward needed them; see
            :func:`ebb.ahead.configure`.
        replay_seconds: host time of the recomputation. On a GPU the kernels run later.
        ahead_seconds: the part of ``replay_seconds`` before backward needed the results, on another
            thread.
        stack: the program's Python stack when they were computed, innermost first, without frames
            of torch and ebb: ``"/src/model.py:12 in forward"``.
        layers: how many modules of the same kind the row joins; see :meth:`Report.collapsed`.
    """

    region: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    fate: str
    rule: str
    reason: str
    count: int
    bytes: int
    eager: int
    replays: int
    replays_ahead: int
    replay_seconds: float
    ahead_seconds: float
    stack: tuple[str, ...]
    layers: int = 1

    decision = Renamed("fate")

    @property
    def where(self) -> str:
        """The module, or the region if no module is known."""
        return self.module or self.region

    @property
    def source(self) -> str:
        """File and line of the program that called the operator; empty if unknown."""
        return self.stack[0].rpartition(" in ")[0] if self.stack else ""


def collapsed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Joins rows of modules whose names differ only by numbers."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (
            *(template(name) for name in (row.region, row.module)),
            *(row.op, row.shape, row.dtype, row.fate, row.rule, row.reason, row.source),
        )
        groups.setdefault(key, []).append(row)
    return tuple(_together(group) for group in groups.values())


def _together(rows: list[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first
    return replace(
        first,
        region=ranges([row.region for row in rows]),
        module=ranges([row.module for row in rows]),
        count=sum(row.count for row in rows),
        bytes=sum(row.bytes for row in rows),
        eager=sum(row.eager for row in rows),
        replays=sum(row.replays for row in rows),
        replays_ahead=sum(row.replays_ahead for row in rows),
        replay_seconds=sum(row.replay_seconds for row in rows),
        ahead_seconds=sum(row.ahead_seconds for row in rows),
        layers=len({row.where for row in rows}),
    )
