"""Saved-tensor hooks of the program around regions, such as torch's ``save_on_cpu``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ebb import _C


def name_of_hooks() -> str | None:
    """The class or function of the innermost hooks; None without hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks:
        return None
    name = str(getattr(hooks[0], "__qualname__", type(hooks[0]).__name__))
    return name.split(".")[0]


def save_inputs(arguments: Iterable[Any]) -> _C.HookedInputs | None:
    """Lets hooks around a checkpointed call save its arguments, as torch's checkpoint does. None if
    there is nothing to save: no hooks, or other regions around, whose inputs the hooks have.
    `enter_region` of the result must be called first in the region. See Note [Hooks around a
    checkpointed call] in hooked_inputs.h."""
    if not torch.is_grad_enabled() or _C.in_region() or name_of_hooks() is None:
        return None
    return _C.HookedInputs([each for each in arguments if isinstance(each, torch.Tensor)])


def refuse_to_offload_twice(region: str) -> None:
    """Raises if another engine offloads the tensors of the region too: each value would move twice,
    and ebb and that engine would wait for each other. torch's ``save_on_cpu`` is allowed: the user
    chose it, and gradients are exact with it."""
    hooks = name_of_hooks()
    deepspeed = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if hooks is not None and "offload" in hooks.lower():
        what = f"saved-tensor hooks around it ({hooks})"
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
