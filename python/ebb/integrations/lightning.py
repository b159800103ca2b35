"""Logs ``ebb.metrics`` with Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

import torch

from ebb._report.metrics import Metrics
from ebb.integrations._needs import library


def _callback() -> Any:
    """The base class. Lightning has two packages, each with its own: that which the program has
    imported, or else that which is installed."""
    packages = ["lightning.pytorch", "pytorch_lightning"]
    for package in sorted(packages, key=lambda name: not sys.modules.get(name)):
        with suppress(ImportError):
            return importlib.import_module(f"{package}.callbacks").Callback
    return library("lightning.pytorch.callbacks", "lightning").Callback  # raises


class EbbCallback(_callback()):  # type: ignore[misc]
    """Logs the metrics of each step with ``log_dict``, every ``log_every_n_steps`` steps:
    ``Trainer(.., callbacks=[EbbCallback()])``.

    A step begins with its first batch, so validation is not part of a step. Each rank measures
    itself, and Lightning logs those of the first rank.

    Attributes:
        metrics: those of the last step; empty before the first.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, int | float] = {}
        self._measured: Metrics | None = None
        self._step = -1  # number of optimizer steps when the step began; -1: none has begun

    def on_train_start(self, *_: Any) -> None:
        self.metrics = {}
        self._measured, self._step = Metrics(), -1

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._measured is not None and trainer.global_step != self._step:
            self._measured.begin()
            self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._measured is None or trainer.global_step == self._step:
            return  # the gradients of more batches are accumulated
        self.metrics = self._measured.read()
        # log_dict takes milliseconds, also at a step that is not logged. Lightning's own callbacks
        # ask the same; a release without this attribute gets each step.
        connector = getattr(trainer, "_logger_connector", None)
        if not getattr(connector, "should_update_logs", True):
            return
        # Lightning's own conversion to float32 would round bytes.
        pl_module.log_dict(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in self.metrics.items()}
        )

    def on_train_end(self, *_: Any) -> None:
        self._measured = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_measured": None}  # counts of this process
