"""Tells of work that the job does beside ebb: recomputation and offloading by its own functions."""

from __future__ import annotations

import torch

from ebb._launch.variables import say_ignored
from ebb._region.offload_twice import offloading_hooks
from ebb._support.job import say
from ebb._support.shown import clipped


def recomputes() -> str | None:
    """What runs Python code in backward now: an autograd function, or a saved-tensor hook.

    None outside backward, and in hooks on gradients: these may run a model for its first time.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return clipped(type(node).__name__.removesuffix("Backward"))
    return "a saved-tensor hook"


def tell_of_recomputation(by: str) -> None:
    """Say once that a block is no region while `by` recomputes it.

    Raises:
        ValueError: EBB_STRICT is set.
    """
    say_ignored(
        f"ebb: blocks are no regions inside {by}",
        "it recomputes them by itself. Turn it off to let ebb recompute them; if it offloads, set "
        "EBB=offload_inputs to offload the inputs of blocks",
    )


def tell_of_offloading() -> None:
    """Say once that saved-tensor hooks of the job offload, but not the tensors of regions."""
    hooks = offloading_hooks()
    if hooks is not None:
        say(
            f"ebb: {clipped(hooks)} does not offload the tensors that regions save; they stay on "
            "the device. To offload the inputs of blocks, turn it off and set EBB=offload_inputs"
        )
