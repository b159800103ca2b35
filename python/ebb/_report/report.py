"""Reports: what happened to each storage of a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ebb import _C
from ebb._report.planned import plan_of_step
from ebb._report.rows import FATES, Row
from ebb._report.step import Step
from ebb._report.text import text
from ebb._support.shown import shown


@dataclass(frozen=True)
class Report(Step):
    """A memory breakdown of one step. See :func:`ebb.report`.

    Attributes:
        step: the step's number, as in :func:`ebb.stats`.
        rows: one :class:`Row` for all storages that are alike; a storage's bytes count in one row.
        ahead: the regions for which replays ran ahead, counted by outcome: ``in_time``, ``late``,
            ``in_vain``, ``held`` and ``stopped``; see ``"ahead"`` of :func:`ebb.stats`.
        idle_rules: rules that had no effect in the step, in words.
        peak_held: the most bytes saved for backward at a time.
        peak_eager: the most bytes that eager would have saved for backward.
        values: for each storage of the rows a tuple: index in ``rows``, bytes, and True if autograd
            packed it.
        replays: tuples: indices in ``values`` of the inputs, indices of the recomputed outputs, and
            the seconds for which backward waited.
        timeline: tuples: seconds since the step began, bytes saved for backward, and bytes that
            eager would save.
        spans: regions, their backwards, replays and transfers, as tuples: kind, name, start and
            duration in seconds, thread, bytes.
        plan: the :class:`ebb.Plan`, or the plan of ``EBB_BUDGET``, under which the step ran, as
            reports show it; None without a plan.
    """

    def text(self, rows: int = 30) -> str:
        """Return the report as a table, largest rows first.

        Args:
            rows: the most rows to show.
        """
        return text(self, rows)

    __str__ = text

    def save(self, path: str | Path) -> None:
        """Write the report to a file.

        Args:
            path: its suffix gives the format: ``.txt``, ``.json`` or ``.html`` (one page that needs
                no network).

        Raises:
            ValueError: the suffix is none of these.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_path(path)
        if path.suffix == ".html":
            path.write_text(self._page(), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        else:
            path.write_text(self.text() + "\n", encoding="utf-8")

    def _page(self) -> str:
        data = self.to_dict()
        data["collapsed"] = self._with_places(self.collapsed())
        data["spans"] = [span for span in self.spans if span[0] in ("region", "backward")]
        data["fates"] = FATES
        folder = Path(__file__).parent
        page = (folder / "report.html").read_text(encoding="utf-8")
        script = (folder / "report.js").read_text(encoding="utf-8")
        before, after = page.replace("{script}", script, 1).split("{data}")
        return before + json.dumps(data).replace("<", "\\u003c") + after


_SUFFIXES = (".txt", ".json", ".html")


def check_path(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"ebb: a report's file name must end in .txt, .json or .html; got {shown(str(path))}"
        )


def reports() -> Iterator[Report]:
    """The recorded steps, oldest first."""
    for found in _C.reports():
        rows = tuple(
            Row(**row | {"stack": tuple(filter(_is_of_program, row["stack"]))})
            for row in found.pop("rows")
        )
        found = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        plan = plan_of_step(found["step"], (row.region for row in rows))
        yield Report(rows=rows, plan=plan, **found)


_NOT_OF_PROGRAM = (f"{torch.__path__[0]}/", f"{Path(__file__).parents[1]}/", "<frozen ")


def _is_of_program(frame: str) -> bool:
    return not frame.startswith(_NOT_OF_PROGRAM)


def latest(all_steps: Iterable[Report]) -> Report | None:
    """The last report of a step that saved something for backward."""
    recorded = [one for one in all_steps if one.rows]
    saving = [one for one in recorded if one.peak_eager > 0]
    return next(reversed(saving or recorded), None)


def report() -> Report:
    """Return the report of the last recorded step: each storage's operator and its fate.

    A step begins when an outermost region is entered after a backward. A storage's bytes count in
    one row, so the rows sum to the totals. ``Report.held`` is the memory of the regions' results
    that is still on the device when the regions end.

    Raises:
        RuntimeError: no step has been recorded.

    Examples:
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
