"""Logs ``ebb.metrics`` with transformers' Trainer."""

from __future__ import annotations

import functools
from typing import Any

from ebb._report.metrics import Metrics
from ebb.integrations._needs import library

_trainer_callback = library("transformers.trainer_callback", "transformers")


class EbbCallback(_trainer_callback.TrainerCallback):  # type: ignore[misc, name-defined]
    """Adds the metrics of the last step to each of the Trainer's training logs, and so to all that
    the Trainer reports to: ``Trainer(.., callbacks=[EbbCallback()])``.

    In a process that has imported ebb, ``TrainingArguments(report_to=["tensorboard", "ebb"])`` adds
    it too. A step begins when the Trainer begins it, so evaluation is not part of a step. Each
    rank measures itself, and the Trainer logs those of the first rank.

    Attributes:
        metrics: those of the last step; empty before the first.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, int | float] = {}
        self._measured: Metrics | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        _extend_log()
        self.metrics = {}
        self._measured = Metrics()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._measured is not None:
            self._measured.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._measured is not None:
            self.metrics = self._measured.read()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._measured = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_measured": None}  # counts of this process


# Note [Where the Trainer logs]
# The Trainer calls its callbacks in order, those of `report_to` first, so a callback of the user's
# comes too late to add to what the others log. Trainer.log is the one place before all of them,
# which writes the Trainer's own history too.


@functools.cache
def _extend_log() -> None:
    trainer = library("transformers", "transformers").Trainer
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if self.control.should_log:  # a training log, and not that of an evaluation
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, EbbCallback):
                    logs.update(callback.metrics)
        return log(self, logs, *args, **kwargs)

    trainer.log = log_with_metrics
