"""A torchtitan activation-checkpointing policy that makes regions of the transformer blocks.

In the trainer's config: ``activation_checkpoint=EbbAC.Config(policy="torchtitan")``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

import ebb


class EbbAC(ActivationCheckpointing):
    """Makes the layers regions, as ``ebb.apply(model, policy, "layers.*")`` does.

    Needs no wrapper modules, and no settings ``preserve_rng_state``, ``determinism_check`` and
    ``debug``: ebb always restores the random state, and does not run Python code again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        policy: str = "torchtitan"
        """A preset's name, a TOML file, or a line such as ``mm:save,default:recompute``."""

    def apply(self, model: torch.nn.Module) -> None:
        """Makes every transformer block of the model a region."""
        text = self.config.policy
        policy = ebb.Policy.load(text) if text.endswith(".toml") else ebb.Policy.parse(text)
        names = [f"layers.{name}" for name, _ in model.get_submodule("layers").named_children()]
        ebb.apply(model, policy, names)
        logger.info(f"Applied ebb's policy {text} to {len(names)} blocks")
