"""Shared by the tests of callbacks: what TensorBoard's files hold, and a stand-in for wandb."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars in the only event file below a folder: values by step, by name."""
    (file,) = folder.rglob("events.out.tfevents.*")
    read = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return {
        name: {event.step: event.value for event in read.Scalars(name)}
        for name in read.Tags()["scalars"]
    }


class Wandb(ModuleType):
    """Stands for the package wandb, in offline mode: records the calls of `log`. Has what
    transformers' WandbCallback calls, and no more: any other call fails."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.logged: list[dict[str, Any]] = []
        self.run: Any = None
        self.config: Any = None

    def init(self, **_: Any) -> None:
        self.run = SimpleNamespace(_label=lambda **_: None, summary={})
        self.config = Config()

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, found: dict[str, Any]) -> None:
        self.logged.append(found)


class Config(dict[str, Any]):
    def update(self, found: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        super().update(found)


def wandb_stand_in(monkeypatch: Any) -> Wandb:
    """`import wandb` gives the stand-in."""
    stand_in = Wandb()
    errors = ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})  # type: ignore[attr-defined]
    names = ("wandb.sdk", "wandb.sdk.lib")
    for name, module in [*((name, ModuleType(name)) for name in names), (errors.__name__, errors)]:
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in
