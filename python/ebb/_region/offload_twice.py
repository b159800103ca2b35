"""Detects another library that offloads: each value would move twice, and ebb and that library
would wait for each other."""

from __future__ import annotations

import re
import sys

from ebb._region.outer_hooks import name_of_hooks

_OFFLOADS = re.compile(r"offload", re.IGNORECASE)


def offloading_hooks() -> str | None:
    """The class of the saved-tensor hooks that offload now, such as TRL's; None without."""
    name = name_of_hooks()
    return name if name is not None and _OFFLOADS.search(name) else None


def refuse(region: str) -> None:
    """Raises if another engine offloads the tensors of the region `region`.

    torch's ``save_on_cpu`` is allowed: the user chose it, and gradients are exact with it.

    Raises:
        RuntimeError: saved-tensor hooks around the region offload tensors, as those of TRL's
            ``activation_offloading`` do; or DeepSpeed's ``cpu_checkpointing`` is on.
    """
    found = offloading_hooks()
    deepspeed = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if found is not None:
        what = f"saved-tensor hooks around it ({found})"
        remedy = "turn these hooks off (TRL: activation_offloading=False)"
    elif getattr(deepspeed, "CPU_CHECKPOINT", False):
        what = "DeepSpeed's activation checkpointing"
        remedy = "set cpu_checkpointing to false in DeepSpeed's config"
    else:
        return
    raise RuntimeError(
        f"ebb: the tensors of region {region!r} would be offloaded twice, by its policy and by "
        f"{what}. Either {remedy}, or use a policy without OFFLOAD."
    )
