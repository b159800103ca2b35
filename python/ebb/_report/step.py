"""The data of one step, which reports show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from ebb._report.advice import Advice, Replays
from ebb._report.planned import ReportedPlan
from ebb._report.rows import FATES, HELD, Row, collapsed
from ebb._support.old import Renamed


@dataclass(frozen=True)
class Step:
    """The data of an :class:`ebb.Report`, without its output formats."""

    FATES = FATES
    DECISIONS = Renamed("FATES")

    step: int
    rows: tuple[Row, ...]
    ahead: dict[str, int]
    idle_rules: tuple[str, ...]
    peak_held: int
    peak_eager: int
    timeline: tuple[tuple[float, int, int], ...] = field(repr=False)
    values: tuple[tuple[int, int, bool], ...] = field(repr=False)
    replays: tuple[tuple[list[int], list[int], float], ...] = field(repr=False)
    spans: tuple[tuple[str, str, float, float, int, int], ...] = field(repr=False)
    plan: ReportedPlan | None = field(default=None, repr=False, compare=False)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by fate."""
        return {
            fate: sum(row.bytes for row in self.rows if row.fate == fate)
            for fate in FATES
            if fate != "unneeded"
        }

    @property
    def held(self) -> int:
        """Bytes that were allocated in the regions and are on the device when they end."""
        return sum(self.totals[fate] for fate in HELD)

    @property
    def eager(self) -> int:
        """Bytes that eager would save for backward: the sum over rows."""
        return sum(row.eager for row in self.rows)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Rules that would each save time, the best first. Empty under a plan: ``plan.points``
        shows the effect of other budgets."""
        return () if self.plan else Replays(self.rows, self.values, self.replays).advice()

    def collapsed(self) -> tuple[Row, ...]:
        """Join rows of modules whose names differ only by numbers.

        ``layers.0.mlp`` to ``layers.31.mlp`` become ``layers.0-31.mlp``, with ``layers=32``.
        """
        return collapsed(self.rows)

    @cached_property
    def _stacks(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(row.stack for row in self.rows))

    def _with_places(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """The rows for JSON, with the index of the stack in place of the stack."""
        places = {stack: place for place, stack in enumerate(self._stacks)}
        return [asdict(replace(row, stack=())) | {"stack": places[row.stack]} for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary for JSON."""
        return {
            "step": self.step,
            "peak_held": self.peak_held,
            "peak_eager": self.peak_eager,
            "held": self.held,
            "eager": self.eager,
            "totals": self.totals,
            "ahead": self.ahead,
            "idle_rules": self.idle_rules,
            # "decision" is the old name of "fate", to be removed in the next release.
            "rows": [row | {"decision": row["fate"]} for row in self._with_places(self.rows)],
            "stacks": self._stacks,
            "advice": [asdict(one) | {"rule": one.rule} for one in self.advice],
            "timeline": self.timeline,
            "plan": None if self.plan is None else self.plan.to_dict(),
        }
