"""Replacements of frameworks' checkpoint functions, while ebb takes these over.

Each takes the framework's own function, called `original`, and then its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from ebb import _C
from ebb._launch import checkpoint_calls
from ebb._launch.variables import warn_setting_ignored
from ebb._region.placeholder import discard, discardable

Own: TypeAlias = Callable[..., Any]

# Frameworks with their versions, for messages: "Megatron-Core 0.16.1 (tested: 0.14, 0.15, 0.16)".
VERSIONS: dict[str, str] = {}


def _region(
    framework: str, what: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    source = f"{what} of {VERSIONS[framework]}"
    return checkpoint_calls.region_of_call(function, arguments, source=source)


def _in_region(
    framework: str, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    outer, inner = _region(framework, what, function, args)
    with outer, inner:
        return function(*args, **kwargs)


def _left(framework: str, setting: str, remedy: str) -> None:
    """Say once that ebb leaves a framework's recomputation in place because of a setting."""
    warn_setting_ignored(
        f"ebb: checkpoint calls of {framework} are no regions",
        f"{setting} is on, and {framework} recomputes by itself then. {remedy}",
    )


def megatron(original: Own, /, function: Any, distribute_saved_activations: Any, *args: Any) -> Any:
    """megatron.core.tensor_parallel.checkpoint."""
    if checkpoint_calls.runs_original():
        return original(function, distribute_saved_activations, *args)
    if distribute_saved_activations:
        remedy = "Turn it off to let ebb take the calls over"
        _left("Megatron-Core", "--distribute-saved-activations", remedy)
        return original(function, distribute_saved_activations, *args)
    return _in_region("Megatron-Core", "checkpoint", function, *args)


def buffer(
    original: Own,
    /,
    self: Any,
    tensor_shape: Any,
    dtype: Any,
    name: Any,
    mem_alloc_context: Any = None,
) -> Any:
    """GlobalMemoryBuffer.get_tensor. Layers write to one buffer, so a region would have to keep its
    contents. In a region, the buffer is new memory, which a replay can fill again."""
    if not _C.in_region():
        return original(self, tensor_shape, dtype, name, mem_alloc_context)
    # ebb sees new_empty, which has a tensor argument, but not torch.empty.
    empty = torch.empty(0, dtype=dtype, device=torch.cuda.current_device())
    return empty.new_empty(tensor_shape)


def without_output(original: Own, /, self: Any, run_function: Any, *args: Any) -> Any:
    """CheckpointWithoutOutput.checkpoint: the results are marked for `discard_output`."""
    vars(self).pop("ebb_discardable", None)
    if checkpoint_calls.runs_original() or _warms_up_a_graph():
        return original(self, run_function, *args)
    if _computes_in_fp8(self):
        _left(
            "Megatron-Core",
            "FP8",
            "ebb does not see TransformerEngine's kernels: name modules that run others, "
            "EBB_MODULES='*.layers.*.mlp'",
        )
        return original(self, run_function, *args)
    outer, inner = _region("Megatron-Core", "CheckpointWithoutOutput", run_function, args)
    with outer, inner:
        outputs = run_function(*args)
        leaves = {id(leaf): leaf for leaf in tree_leaves(outputs)}
        self.ebb_discardable = [leaf for leaf in leaves.values() if _is_discardable(leaf)]
    return outputs


def _is_discardable(output: Any) -> bool:
    """Mark a result, unless the policy keeps it or no region is open."""
    try:
        discardable(output)
    except (TypeError, ValueError):
        return False
    return True


def discard_output(original: Own, /, self: Any, hook_tensor: Any) -> None:
    """CheckpointWithoutOutput.discard_output_and_register_recompute. A second call does nothing."""
    outputs = vars(self).get("ebb_discardable")
    if outputs is None:
        original(self, hook_tensor)
        return
    self.ebb_discardable = []
    for output in outputs if hook_tensor.requires_grad else ():
        with suppress(ValueError):  # written after the mark: the result keeps its memory
            discard(output, restore_at=hook_tensor)


def _warms_up_a_graph() -> bool:
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    asks = getattr(graphs, "is_graph_warmup", None)  # since Megatron-Core 0.16
    return asks is not None and asks()


def _computes_in_fp8(itself: Any) -> bool:
    """True in TransformerEngine's FP8 context; `itself.fp8` is also set for ``fp8=False``."""
    manager = vars(sys.modules[type(itself).__module__]).get("FP8GlobalStateManager")
    return bool(itself.fp8 and manager is not None and manager.is_fp8_enabled())


def deepspeed(original: Own, /, function: Any, *args: Any, **kwargs: Any) -> Any:
    """deepspeed.checkpointing.checkpoint and non_reentrant_checkpoint."""
    settings = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    if checkpoint_calls.runs_original():
        return original(function, *args, **kwargs)
    for name, key, also in (
        ("PARTITION_ACTIVATIONS", "partition_activations", ""),
        ("CPU_CHECKPOINT", "cpu_checkpointing", ", and EBB=offload_inputs to offload inputs"),
    ):
        if vars(settings).get(name):
            remedy = f'Set "{key}" to false in activation_checkpointing of the configuration{also}'
            _left("DeepSpeed", key, remedy)
            return original(function, *args, **kwargs)
    outputs = _in_region("DeepSpeed", "checkpoint", function, *args, **kwargs)
    several = [outputs] if torch.is_tensor(outputs) else list(outputs)
    return several[0] if len(several) == 1 else tuple(several)
