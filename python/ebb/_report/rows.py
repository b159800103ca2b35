"""The rows of a report: storages that are alike, and their fate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ebb._support.names import ranges, template

FATES = {
    "saved": "saved on the device, as the policy decides",
    "kept": "in memory although the policy would recompute it, or made outside of the region by "
    "an autograd function and needed by its backward",
    "recomputed": "freed in forward, recomputed in backward",
    "offloaded": "moved to host memory or disk, copied back in backward",
    "paged": "valid rows moved to a page pool, and back in backward",
    "escaped": "recomputable, but still referenced by the program when the region ended (a cache, "
    "an attribute, an output)",
    "result": "referenced by the program when the region ended, and not needed by the region's "
    "backward (such as a return value)",
    "copied": "a copy, made before a write because a replay needs the old contents",
    "outside": "made outside of the region (inputs, parameters): held by other code, or "
    "counted in another row",
    "unneeded": "not needed by autograd; recomputed only as an input of another replay",
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
        shape: shape of the operator's result; -1 where joined rows differ, see
            ``Report.collapsed``.
        dtype: dtype of the operator's result, such as ``"float32"``.
        fate: what happened to them; a key of ``Report.FATES``.
        rule: the rule that matched.
        reason: why they are in memory against the policy's decision.
        count: the number of storages.
        bytes: the bytes of all storages together.
        eager: the part of ``bytes`` that eager would save for backward.
        replays: the number of recomputed results.
        replays_ahead: the part of ``replays`` that ran before backward needed them; see
            ``ebb.config.ahead``.
        replay_seconds: host time of the recomputation. On a GPU the kernels run later.
        ahead_seconds: the part of ``replay_seconds`` before backward needed the results, on another
            thread.
        stack: the program's Python stack when they were computed, innermost first, without frames
            of torch and ebb: ``"/src/model.py:12 in forward"``.
        layers: how many modules of the same kind the row joins; see ``Report.collapsed``.
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

    @property
    def where(self) -> str:
        """The module, or the region if no module is known."""
        return self.module or self.region

    @property
    def source(self) -> str:
        """File and line of the program that called the operator; empty if unknown."""
        return self.stack[0].rpartition(" in ")[0] if self.stack else ""


_SUMS = (
    "count", "bytes", "eager", "replays", "replays_ahead", "replay_seconds", "ahead_seconds",
)  # fmt: skip


def collapsed(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Joins rows of modules whose names differ only by numbers. Their results may have different
    numbers of rows, as those of experts with a router have."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (
            *(template(name) for name in (row.region, row.module)),
            *(row.op, len(row.shape), row.shape[1:] or row.shape, row.dtype),
            *(row.fate, row.rule, row.reason, row.source),
        )
        groups.setdefault(key, []).append(row)
    return tuple(_together(group) for group in groups.values())


def _together(rows: list[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first
    is_same = len({row.shape for row in rows}) == 1
    return replace(
        first,
        region=ranges([row.region for row in rows]),
        module=ranges([row.module for row in rows]),
        shape=first.shape if is_same else (-1, *first.shape[1:]),
        layers=len({row.where for row in rows}),
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMS},
    )
