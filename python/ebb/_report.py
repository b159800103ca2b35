"""Reports: what became of each storage of a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ebb import _C
from ebb._names import ranges, template

DECISIONS = {
    "saved": "kept on the device: the policy says so",
    "kept": "kept though the policy would recompute: it cannot be made again, see the reason",
    "recomputed": "dropped in the forward, made again in backward",
    "offloaded": "moved to host memory, fetched in backward",
    "paged": "its live rows moved to a page pool, and back in backward",
    "escaped": "could be dropped, but the program (a cache, an attribute, an output) still held it",
    "result": "held by the program when the region ended, and not for its backward",
    "copied": "a copy, made because a replay needs what a write was about to change",
    "outside": "made outside of the region (inputs, parameters) and held by whoever made it",
    "unneeded": "made again on the way to something else; held by nobody",
}
# Memory that was taken in the region and is on the device when it ends.
HELD = ("saved", "kept", "escaped", "copied", "result")


@dataclass(frozen=True)
class Row:
    """Storages that are alike.

    Attributes:
        region: the region in which they were made.
        module: the innermost module that ran, if it is known.
        op: the operator that made them, or ``"from outside"``.
        shape: of the operator's result.
        dtype: likewise, such as ``"float32"``.
        decision: what became of them; a key of ``Report.DECISIONS``.
        rule: the rule that decided.
        reason: why they are kept against the policy's word.
        count: how many storages.
        bytes: of all of them.
        replays: how many results were made again.
        replay_seconds: of the host, in kernels that were called again for them. On a GPU kernels
            run later.
        layers: how many modules of the same kind were put together; see :meth:`Report.collapsed`.
    """

    region: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    decision: str
    rule: str
    reason: str
    count: int
    bytes: int
    replays: int
    replay_seconds: float
    layers: int = 1

    @property
    def where(self) -> str:
        """The module, or the region if no module is known."""
        return self.module or self.region


@dataclass(frozen=True)
class Report:
    """What one step did. See :func:`ebb.report`.

    Attributes:
        step: its number, as in :func:`ebb.stats`.
        rows: a :class:`Row` for each kind of storage; each storage is in one row.
        idle_rules: rules that decided on nothing, in words.
        peak_held: the most bytes that were held for backward at a time.
        peak_eager: the most that eager would have held for backward.
        timeline: tuples of seconds since the step began, bytes held for backward, and bytes that
            eager would hold.
        spans: tuples of kind, name, start and duration in seconds, thread, bytes.
    """

    DECISIONS = DECISIONS

    step: int
    rows: tuple[Row, ...]
    idle_rules: tuple[str, ...]
    peak_held: int
    peak_eager: int
    timeline: tuple[tuple[float, int, int], ...] = field(repr=False)
    spans: tuple[tuple[str, str, float, float, int, int], ...] = field(repr=False)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by decision."""
        return {
            decision: sum(row.bytes for row in self.rows if row.decision == decision)
            for decision in DECISIONS
            if decision != "unneeded"
        }

    @property
    def held(self) -> int:
        """Bytes that were taken in the regions and are on the device when they end."""
        return sum(self.totals[decision] for decision in HELD)

    def collapsed(self) -> tuple[Row, ...]:
        """Rows of modules that differ by numbers in their names only, put together.

        ``layers.0.mlp`` to ``layers.31.mlp`` become ``layers.0-31.mlp``, with ``layers=32``.
        """
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            key = (
                *(template(name) for name in (row.region, row.module)),
                *(row.op, row.shape, row.dtype, row.decision, row.rule, row.reason),
            )
            groups.setdefault(key, []).append(row)
        return tuple(_together(group) for group in groups.values())

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "step": self.step,
            "peak_held": self.peak_held,
            "peak_eager": self.peak_eager,
            "held": self.held,
            "totals": self.totals,
            "idle_rules": self.idle_rules,
            "rows": [asdict(row) for row in self.rows],
            "timeline": self.timeline,
        }

    def text(self, rows: int = 30) -> str:
        """A table, largest first.

        Args:
            rows: the most rows that are shown.
        """
        from ebb._report_text import text

        return text(self, rows)

    __str__ = text

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Args:
            path: its suffix tells the format: ``.txt``, ``.json``, ``.html`` (one page that needs
                no network) or ``.png`` (needs matplotlib, which ``torch-ebb[plot]`` installs).

        Raises:
            ValueError: the suffix is another.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_path(path)
        if path.suffix == ".png":
            from ebb._report_plot import plot

            plot(self, path)
        elif path.suffix == ".html":
            path.write_text(self._page(), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        else:
            path.write_text(self.text() + "\n", encoding="utf-8")

    def _page(self) -> str:
        data = self.to_dict()
        data["collapsed"] = [asdict(row) for row in self.collapsed()]
        data["decisions"] = DECISIONS
        page = (Path(__file__).parent / "_report.html").read_text(encoding="utf-8")
        return page.replace("{}", json.dumps(data).replace("<", "\\u003c"), 1)


_SUFFIXES = (".txt", ".json", ".html", ".png")


def check_path(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"ebb: a report is written to {', '.join(_SUFFIXES)}; got {str(path)!r}")


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
        replays=sum(row.replays for row in rows),
        replay_seconds=sum(row.replay_seconds for row in rows),
        layers=len({row.where for row in rows}),
    )


def reports() -> Iterator[Report]:
    """The last steps that were recorded, oldest first."""
    for found in _C.reports():
        rows = tuple(Row(**row) for row in found.pop("rows"))
        timeline, spans = tuple(found.pop("timeline")), tuple(found.pop("spans"))
        idle_rules = tuple(found.pop("idle_rules"))
        yield Report(rows=rows, idle_rules=idle_rules, timeline=timeline, spans=spans, **found)


def latest(all_steps: Iterable[Report]) -> Report | None:
    """The last of them in which something was saved for backward."""
    recorded = [one for one in all_steps if one.rows]
    saving = [one for one in recorded if one.peak_eager > 0]
    return next(reversed(saving or recorded), None)


def report() -> Report:
    """What the last recorded step did: who made each storage, and what became of it.

    A step begins when an outermost region is entered after a backward. Parts sum to totals: each
    storage is in one row, and ``Report.held`` is what the allocator has for what the regions made.

    Raises:
        RuntimeError: no step has been recorded.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> with ebb.record_reports(), ebb.region(ebb.policies.save_matmuls):
        ...     loss = net(torch.ones(2, 8)).sum()
        >>> loss.backward()
        >>> ebb.report().totals["recomputed"]
        64
    """
    found = latest(reports())
    if found is None or not found.rows:
        raise RuntimeError(
            "ebb: no step has been recorded. Run one under `with ebb.record_reports():`, or set "
            "the environment variable EBB_REPORT to the path of a file before the program starts"
        )
    return found


class record_reports:
    """Records what becomes of each storage, for :func:`ebb.report`, in the whole process.

    Takes effect at once, for outermost regions that are entered from now on; as a context manager
    it sets what was before back at the end. What was recorded stays. Changes nothing that ebb does,
    and costs about a microsecond for each operator. If the program runs out of memory meanwhile,
    the report of that step is printed to stderr. Modules tell their names if this is on when
    ``ebb.apply`` is called, or when a region is given its ``root``.

    Args:
        steps: the last so many steps are kept; 0 switches it off.

    Raises:
        TypeError: ``steps`` is no integer.
        ValueError: it is negative.
    """

    def __init__(self, steps: int = 1) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"ebb: steps must be an int; got {type(steps).__name__}")
        if not 0 <= steps < 2**32:
            raise ValueError(f"ebb: steps must be at least 0; got {steps}")
        if steps > 0:
            from ebb._report_files import observe_out_of_memory

            observe_out_of_memory()
        self._before = _C.set_reporting(steps)

    def __enter__(self) -> record_reports:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            from ebb._report_files import note_error

            note_error(error)
        _C.set_reporting(self._before)
