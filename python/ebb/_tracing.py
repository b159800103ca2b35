"""Under torch.compile ebb steps aside: the compiler decides what is kept.

ebb sees no op of a graph that torch.compile has made. A function that is to be a region is handed
to ``torch.utils.checkpoint.checkpoint`` instead, whose tags torch's partitioner obeys; for a block
of code, ``with ebb.region()``, there is no such form.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ebb._log import log

if TYPE_CHECKING:
    from ebb._policy import Policy

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _warn() -> None:
    warnings.warn(
        "ebb: `with ebb.region()` is traced by torch.compile, which decides by itself what is kept "
        "there. To give it the policy, make the code a function: ebb.checkpoint, ebb.apply, a "
        "decorator, or torch.utils.checkpoint.checkpoint with context_fn=policy.to_sac().",
        stacklevel=2,
    )


# Called while Dynamo traces, once for each trace.
@torch.compiler.assume_constant_result  # type: ignore[misc]
def block_is_traced() -> bool:
    _warn()
    return True


@torch.compiler.assume_constant_result  # type: ignore[misc]
def function_is_traced() -> bool:
    _log_once()
    return True


@functools.cache
def _log_once() -> None:
    log.info("a region is traced by torch.compile: its policy goes to torch's partitioner")


# Where tracing a checkpointed function fails, as for one with side effects, Dynamo goes on with the
# functions around it one by one, and those that it does not make graphs of run as they are. So ours
# are such functions: they then make a region, and do not call torch's checkpoint function in eager.
def never_first_of_a_graph(function: F) -> F:
    """A decorator: traced as a part of its callers only."""
    frames: Any = torch._C._dynamo.eval_frame  # torch._dynamo would take a second to import
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


@never_first_of_a_graph
def checkpoint(
    policy: Policy | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function so that torch's partitioner keeps what the policy keeps.

    Args:
        policy: None for ``recompute_all``.
        function: called with the rest.
    """
    function_is_traced()
    return _torch_checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=noop_context_fn if policy is None else policy._sac_context_fn,
        **kwargs,
    )
