"""Replacements of frameworks' checkpoint functions, while ebb takes these over.

Each function `code_of_..` supplies the code of one function of a framework. The code runs with the
globals of the framework's module, so it imports what it calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import noop_context_fn

from ebb import _C
from ebb._launch import checkpoint_calls
from ebb._launch.variables import say_ignored
from ebb._region.placeholder import discard, discardable

# Copies of the replaced functions with their original code, by the name of the function that
# supplies the new code.
ORIGINALS: dict[str, Callable[..., Any]] = {}
# Frameworks with their versions, for messages: "Megatron-Core 0.16.1 (tested: 0.14, 0.15, 0.16)".
VERSIONS: dict[str, str] = {}


def code_of_megatron(function: Any, distribute_saved_activations: Any, *args: Any) -> Any:
    from ebb._launch.frameworks import calls

    return calls.megatron(function, distribute_saved_activations, *args)


def code_of_without_output(self: Any, run_function: Any, *args: Any) -> Any:
    from ebb._launch.frameworks import calls

    return calls.without_output(self, run_function, *args)


def code_of_discard(self: Any, hook_tensor: Any) -> Any:
    from ebb._launch.frameworks import calls

    return calls.discard_output(self, hook_tensor)


def code_of_buffer(
    self: Any, tensor_shape: Any, dtype: Any, name: Any, mem_alloc_context: Any = None
) -> Any:
    from ebb._launch.frameworks import calls

    return calls.buffer(self, tensor_shape, dtype, name, mem_alloc_context)


def code_of_deepspeed(function: Any, *args: Any, **kwargs: Any) -> Any:
    from ebb._launch.frameworks import calls

    return calls.deepspeed("code_of_deepspeed", function, *args, **kwargs)


def code_of_deepspeed_without_reentrant(function: Any, *args: Any) -> Any:
    from ebb._launch.frameworks import calls

    return calls.deepspeed("code_of_deepspeed_without_reentrant", function, *args)


def code_of_fairscale(
    original_forward: Any, weak_self: Any, offload_to_cpu: Any, *args: Any, **kwargs: Any
) -> Any:
    from ebb._launch.frameworks import calls

    return calls.fairscale(original_forward, weak_self, offload_to_cpu, *args, **kwargs)


def _region(
    framework: str, what: str, function: Callable[..., Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    source = f"{what} of {VERSIONS[framework]}"
    return checkpoint_calls.region_of_call(function, noop_context_fn, source)


def _in_region(
    framework: str, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    outer, inner = _region(framework, what, function)
    with outer, inner:
        return function(*args, **kwargs)


def _left(framework: str, setting: str, remedy: str) -> None:
    """Say once that ebb leaves a framework's recomputation in place because of a setting."""
    say_ignored(
        f"ebb: checkpoint calls of {framework} are no regions",
        f"{setting} is on, and {framework} recomputes by itself then. {remedy}",
    )


def megatron(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
    """megatron.core.tensor_parallel.checkpoint."""
    if checkpoint_calls.is_traced():
        return ORIGINALS["code_of_megatron"](function, distribute, *args)
    if distribute:
        _left(
            "Megatron-Core",
            "--distribute-saved-activations",
            "Turn it off to let ebb take the calls over",
        )
        return ORIGINALS["code_of_megatron"](function, distribute, *args)
    return _in_region("Megatron-Core", "checkpoint", function, *args)


def buffer(itself: Any, shape: Any, dtype: torch.dtype, name: str, context: Any) -> torch.Tensor:
    """GlobalMemoryBuffer.get_tensor. Layers write to one buffer, so a region would have to keep its
    contents. In a region, the buffer is new memory, which a replay can fill again."""
    if not _C.in_region():
        original = ORIGINALS["code_of_buffer"]
        return cast(torch.Tensor, original(itself, shape, dtype, name, context))
    # ebb sees new_empty, which has a tensor argument, but not torch.empty.
    return torch.empty(0, dtype=dtype, device=torch.cuda.current_device()).new_empty(shape)


def without_output(itself: Any, function: Callable[..., Any], *args: Any) -> Any:
    """CheckpointWithoutOutput.checkpoint: the results are marked for `discard_output`."""
    original = ORIGINALS["code_of_without_output"]
    vars(itself).pop("ebb_discardable", None)
    if checkpoint_calls.is_traced() or _warms_up_a_graph():
        return original(itself, function, *args)
    if _computes_in_fp8(itself):
        _left(
            "Megatron-Core",
            "FP8",
            "ebb does not see TransformerEngine's kernels: name modules that run others, "
            "EBB_MODULES='*.layers.*.mlp'",
        )
        return original(itself, function, *args)
    outer, inner = _region("Megatron-Core", "CheckpointWithoutOutput", function)
    with outer, inner:
        outputs = function(*args)
        leaves = {id(leaf): leaf for leaf in tree_leaves(outputs)}
        itself.ebb_discardable = [leaf for leaf in leaves.values() if _is_discardable(leaf)]
    return outputs


def _is_discardable(output: Any) -> bool:
    """Mark a result, unless the policy keeps it or no region is open."""
    try:
        discardable(output)
    except (TypeError, ValueError):
        return False
    return True


def discard_output(itself: Any, hook_tensor: torch.Tensor) -> None:
    """CheckpointWithoutOutput.discard_output_and_register_recompute. A second call does nothing."""
    outputs = vars(itself).get("ebb_discardable")
    if outputs is None:
        ORIGINALS["code_of_discard"](itself, hook_tensor)
        return
    itself.ebb_discardable = []
    if not hook_tensor.requires_grad:
        return
    for output in outputs:
        with suppress(ValueError):  # written after the mark: the result keeps its memory
            discard(output, restore_at=hook_tensor)


def _warms_up_a_graph() -> bool:
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    asks = getattr(graphs, "is_graph_warmup", None)  # since Megatron-Core 0.16
    return asks is not None and asks()


def _computes_in_fp8(itself: Any) -> bool:
    """True in TransformerEngine's FP8 context. `itself.fp8` alone does not tell: it is also set for
    ``fp8=False``."""
    manager = vars(sys.modules[type(itself).__module__]).get("FP8GlobalStateManager")
    return bool(itself.fp8 and manager is not None and manager.is_fp8_enabled())


def deepspeed(original: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """deepspeed.checkpointing.checkpoint and non_reentrant_checkpoint."""
    settings = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    if checkpoint_calls.is_traced():
        return ORIGINALS[original](function, *args, **kwargs)
    for name, key in (
        ("PARTITION_ACTIVATIONS", "partition_activations"),
        ("CPU_CHECKPOINT", "cpu_checkpointing"),
    ):
        if vars(settings).get(name):
            remedy = f'Set "{key}" to false in activation_checkpointing of the configuration'
            if name == "CPU_CHECKPOINT":
                remedy += ", and EBB=offload_inputs to offload the inputs of blocks"
            _left("DeepSpeed", key, remedy)
            return ORIGINALS[original](function, *args, **kwargs)
    outputs = _in_region("DeepSpeed", "checkpoint", function, *args, **kwargs)
    several = [outputs] if torch.is_tensor(outputs) else list(outputs)
    return several[0] if len(several) == 1 else tuple(several)


def fairscale(
    forward: Callable[..., Any], owner: Any, offloads: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a module in fairscale's checkpoint_wrapper."""
    own = sys.modules["fairscale.nn.checkpoint.checkpoint_activations"]
    original = ORIGINALS["code_of_fairscale"]
    is_off = not torch.is_grad_enabled() or own.thread_local.is_checkpointing_disabled
    if is_off or checkpoint_calls.is_traced():
        return original(forward, owner, offloads, *args, **kwargs)
    if offloads:
        _left(
            "fairscale",
            "offload_to_cpu",
            "Leave it out, and set EBB=offload_inputs to offload the inputs of blocks",
        )
        return original(forward, owner, offloads, *args, **kwargs)
    with own.enable_checkpointing():
        return _in_region("fairscale", "checkpoint_wrapper", forward, owner(), *args, **kwargs)
