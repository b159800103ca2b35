"""``python -m ebb --list-modules``: lists modules that could be regions, and what they save."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb import _C
from ebb._launch import models
from ebb._launch.assignment import Assignment
from ebb._region.blocks import block_candidates, find_blocks, regions_by_default
from ebb._region.modules import can_mark, mark, number_modules_once
from ebb._region.region import run_in_region
from ebb._report.report import report
from ebb._report.rows import Row
from ebb._report.text import size
from ebb._support.names import in_ranges
from ebb._support.shown import clipped
from ebb.policies import save_all

_MOST_STEPS = 16  # optimizer steps, after which ebb stops waiting for models that have not run


class Listing(models.ModelObserver):
    """Runs each model of a job as one region that saves everything, until a report shows what
    autograd saves in all models. A report needs a second forward: ebb first sees a model when its
    first forward has begun."""

    def __init__(self) -> None:
        self._models: dict[str, torch.nn.Module] = {}  # by region name
        self._has_told = False
        self._steps = 0  # of optimizers

    def start(self, undo: ExitStack) -> None:
        """Run models as regions until `undo` is closed."""
        undo.callback(_C.set_reporting, _C.set_reporting(1))
        models.take_over(Assignment(save_all, "", ()), undo, self)
        undo.callback(register_optimizer_step_post_hook(self._on_step).remove)

    def on_new_model(self, model: torch.nn.Module) -> None:
        if not any(True for _ in model.children()):
            return
        name = f"{type(model).__name__}@{len(self._models)}"
        number_modules_once(model)
        # A framework may call the model's methods instead of its forward; its blocks still report.
        for inner in {model, *map(model.get_submodule, find_blocks(model))}:
            if can_mark(inner) and mark(inner).region is None:
                mark(inner).region = functools.partial(run_in_region, (save_all, name, "keep"))
        self._models[name] = model

    def _on_step(self, *_: Any) -> None:
        self._steps += 1
        known = {row.region for row in self._rows()}
        is_enough = self._steps > 1 and known.issuperset(self._models)
        if is_enough or self._steps == _MOST_STEPS:
            self.print_found()
            raise SystemExit(0)

    def _rows(self) -> tuple[Row, ...]:
        with suppress(RuntimeError):  # no region has run
            return tuple(report().rows)
        return ()

    def print_found(self) -> None:
        if self._has_told:
            return
        self._has_told = True
        rows = self._rows()
        if not rows:
            print("ebb: no model has run two steps with gradients, so there is nothing to list")
            return
        for region, model in self._models.items():
            own = [row for row in rows if row.region == region and row.fate in ("saved", "kept")]
            print("\n".join(_table(model, own)))


def _table(model: torch.nn.Module, rows: list[Row]) -> Iterable[str]:
    """One line for each set of modules that could be regions."""
    total = sum(row.bytes for row in rows)
    yield f"ebb: {type(model).__name__}: autograd saves {size(total)} of activations"
    yield "    modules    saved bytes  names"
    for names in block_candidates(model):
        inside = sum(
            row.bytes
            for row in rows
            if any(name in ("", row.module) or row.module.startswith(f"{name}.") for name in names)
        )
        shown = clipped(", ".join(in_ranges(name or "the model" for name in names)), 200)
        note = " (the regions under EBB=1)" if names == regions_by_default(model) else ""
        yield f"    {len(names):7}  {size(inside):>13}  {shown}{note}"
