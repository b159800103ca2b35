"""Detects and reports recomputation and offloading by the job's own functions."""

from __future__ import annotations

import torch

from ebb._launch.variables import warn_setting_ignored
from ebb._region.outer_hooks import name_of_hooks
from ebb._support.job import print_once
from ebb._support.shown import clipped


def foreign_recompute_active() -> bool:
    """True if a function of the job recomputes the module being called; prints the function's name.
    If False, the module may be a region; prints a line if the job has saved-tensor hooks."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    # Gradient hooks do not count: GradCache losses run the model with gradients only in a hook.
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        if (hooks := name_of_hooks()) is not None:
            print_once(
                f"ebb: saved-tensor hooks of the job ({clipped(hooks)}) do not get the tensors "
                "that regions save; if the hooks offload, these tensors stay on the device. To "
                "offload the inputs of blocks, turn the hooks off and set EBB=offload_inputs"
            )
        return False
    by = clipped(type(node).__name__.removesuffix("Backward"))
    warn_setting_ignored(
        f"ebb: modules are no regions inside {by}",
        "it recomputes them by itself. Turn it off to let ebb recompute them; if it offloads, set "
        "EBB=offload_inputs to offload the inputs of blocks",
    )
    return True
