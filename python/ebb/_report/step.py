"""The figures of one step, which reports show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ebb._report.planned import ReportedPlan
from ebb._report.rows import FATES, HELD, Row, collapsed
from ebb._support.renamed import Renamed


@dataclass(frozen=True)
class Step:
    """What :class:`ebb.Report` has, apart from how it is shown."""

    FATES = FATES
    DECISIONS = Renamed("FATES")

    step: int
    rows: tuple[Row, ...]
    ahead: dict[str, int]
    idle_rules: tuple[str, ...]
    peak_held: int
    peak_eager: int
    timeline: tuple[tuple[float, int, int], ...] = field(repr=False)
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
        """Bytes that were taken in the regions and are on the device when they end."""
        return sum(self.totals[fate] for fate in HELD)

    def collapsed(self) -> tuple[Row, ...]:
        """Rows of modules that differ by numbers in their names only, put together.

        ``layers.0.mlp`` to ``layers.31.mlp`` become ``layers.0-31.mlp``, with ``layers=32``.
        """
        return collapsed(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "step": self.step,
            "peak_held": self.peak_held,
            "peak_eager": self.peak_eager,
            "held": self.held,
            "totals": self.totals,
            "ahead": self.ahead,
            "idle_rules": self.idle_rules,
            # "decision" is the old name of "fate", and goes with the next release.
            "rows": [asdict(row) | {"decision": row.fate} for row in self.rows],
            "timeline": self.timeline,
            "plan": None if self.plan is None else self.plan.to_dict(),
        }
