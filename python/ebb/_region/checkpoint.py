"""A drop-in replacement for torch.utils.checkpoint.checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as _torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ebb._policy.policy import Policy
from ebb._region.context_fn import policy_of_call
from ebb._region.outer_hooks import save_inputs
from ebb._region.placeholder import discardable
from ebb._region.region import _check_policy, checkpointed, name_of, run_in_region


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: Policy | None = None,
    use_reentrant: bool | None = None,
    context_fn: Callable[..., Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    discard_output: bool = False,
    escapes: str = "keep",
    **kwargs: Any,
) -> Any:
    """Run a function in a region: ``torch.utils.checkpoint.checkpoint`` with per-op policies.

    Every keyword of torch's function is accepted. ebb ignores ``use_reentrant``,
    ``determinism_check``, ``debug``, ``early_stop`` and ``preserve_rng_state``: the function is
    called once, ebb recomputes only what backward needs, and random ops always draw the same
    numbers again. Custom operators (``torch.library``) are recomputed too, as under torch's
    function. On the CPU, such an operator raises a RuntimeError in backward if its replay gives
    different bits.

    Args:
        function: called once, with ``*args`` and ``**kwargs``.
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        context_fn: in place of a policy, torch's argument for selective checkpointing: a list of
            operators or a policy function, in ``create_selective_checkpoint_contexts``. ebb turns
            it into a policy: it asks the function in the first call, and later calls with an equal
            ``context_fn`` and the same function reuse the answers.
        discard_output: mark the tensors that ``function`` returns for
            ``ebb.experimental.discard``. The policy must recompute them.
        escapes: as for ``ebb.region``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: ``function`` is not callable, or the policy has the wrong type.
        ValueError: both a policy and a ``context_fn`` are given, ``escapes`` is unknown, or
            ``discard_output`` is set and the policy does not recompute an output.

    Under ``torch.compile`` the compiler saves and recomputes what the policy says; see
    docs/guide/compile.md.

    Examples:
        >>> w = torch.ones(3, 3, requires_grad=True)
        >>> ebb.checkpoint(torch.mm, torch.ones(2, 3), w, use_reentrant=False).sum().backward()
        >>> from functools import partial
        >>> from torch.utils.checkpoint import create_selective_checkpoint_contexts
        >>> sac = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        >>> ebb.checkpoint(torch.mm, torch.ones(2, 3), w, context_fn=sac).sum().backward()
    """
    if policy is not None and context_fn is not noop_context_fn:
        raise ValueError("ebb: checkpoint takes a policy or a context_fn, not both")
    if is_dynamo_compiling():
        if context_fn is not noop_context_fn:
            kwargs |= {"use_reentrant": False, "context_fn": context_fn}
            return _torch_checkpoint(function, *args, **kwargs)
        return run_in_region((policy, None, escapes), function, *args, **kwargs)
    if not callable(function):
        raise TypeError(
            f"ebb: checkpoint: function must be callable; got {type(function).__name__}"
        )
    for keyword in _LATER_KEYWORDS:
        kwargs.pop(keyword, None)
    name = name_of(function)
    chosen, asking = policy_of_call(_check_policy(policy), context_fn, name)
    region = checkpointed(chosen, name, escapes=escapes)
    inputs = save_inputs(args)
    with region as entered:
        if inputs is not None:
            inputs.enter_region()
        with asking:
            outputs = function(*args, **kwargs)
        entered.returns(outputs)
        if discard_output:
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor):
                    discardable(output)
        return outputs


# Keywords that later versions of torch added. ebb accepts and ignores them.
_LATER_KEYWORDS = (
    inspect.signature(_torch_checkpoint).parameters.keys()
    - inspect.signature(checkpoint).parameters.keys()
)
