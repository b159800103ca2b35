"""Saved-tensor hooks of the program around regions, such as torch's ``save_on_cpu``."""

from __future__ import annotations

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
    """Let hooks around a checkpointed call save its arguments, as torch's checkpoint does.

    Called just before the call's region begins. See Note [Hooks around a checkpointed call] in
    hooked_inputs.h. A build without that plug-in raises.

    Returns:
        Inputs whose `enter_region` must be called first in the region. None without hooks, and
        inside of other regions, whose inputs the hooks have.
    """
    if not torch.is_grad_enabled() or _C.in_region() or name_of_hooks() is None:
        return None
    return _C.HookedInputs([each for each in arguments if isinstance(each, torch.Tensor)])
