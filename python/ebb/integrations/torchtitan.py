"""torchtitan's activation checkpointing and metrics by ebb, for the trainer's config:
``activation_checkpoint=EbbAC.Config(policy="torchtitan")`` and ``metrics=EbbMetrics.Config()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ebb._policy.policy import Policy
from ebb._region.apply import apply
from ebb._report.metrics import Metrics
from ebb.integrations._needs import library

_checkpoint = library("torchtitan.distributed.activation_checkpoint", "torchtitan")
_metrics = library("torchtitan.components.metrics", "torchtitan")


class EbbAC(_checkpoint.ActivationCheckpointing):  # type: ignore[misc, name-defined]
    """Makes the layers regions, as ``ebb.apply(model, policy, "layers.*")`` does.

    Needs no wrapper modules, and no settings ``preserve_rng_state``, ``determinism_check`` and
    ``debug``: ebb always restores the random state, and does not run Python code again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_checkpoint.ActivationCheckpointing.Config):  # type: ignore[misc, name-defined]
        policy: str = "torchtitan"
        """A preset's name, a TOML file, or a line such as ``mm:save,default:recompute``."""

    def apply(self, model: torch.nn.Module) -> None:
        """Make every transformer block of the model a region.

        Raises:
            AttributeError: the model has no module ``layers``.
            ValueError: the policy is none.
        """
        text = self.config.policy
        policy = Policy.load(text) if text.endswith(".toml") else Policy.parse(text)
        names = [f"layers.{name}" for name, _ in model.get_submodule("layers").named_children()]
        apply(model, policy, names)
        _metrics.logger.info(f"Applied ebb's policy {text} to {len(names)} blocks")


class EbbMetrics(_metrics.MetricsProcessor):  # type: ignore[misc, name-defined]
    """torchtitan's metrics, and those of ebb for the last step.

    Attributes:
        metrics: ebb's, of the last step; empty before the first.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_metrics.MetricsProcessor.Config):  # type: ignore[misc, name-defined]
        """As of torchtitan's own class."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.metrics: dict[str, int | float] = {}
        self._measured = Metrics()

    def should_log(self, step: int) -> bool:
        """torchtitan asks once at the end of each step."""
        self.metrics = self._measured.read()
        return bool(super().should_log(step))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """As of torchtitan's own class."""
        found = {**(extra_metrics or {}), **self.metrics}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, found)
