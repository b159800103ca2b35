"""Turns the ``context_fn`` of a checkpoint call into a policy."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from ebb import _C
from ebb._policy import from_sac
from ebb._policy.policy import Policy
from ebb._region import context_keys
from ebb._support.job import print_once
from ebb._support.shown import clipped


@functools.cache
def _warn_recompute_context() -> None:
    warnings.warn(
        "ebb: the recomputation context that a context_fn returned is ignored, because ebb "
        "does not call the checkpointed function again, but replays the operators that backward "
        "needs. If recomputation depends on that context, run the job without ebb (EBB_DISABLE=1).",
        stacklevel=5,
    )


def _is_composables(context_fn: Any) -> bool:
    """True for torch.distributed._composable, whose context only disables its own hook."""
    return getattr(context_fn, "__module__", "").startswith("torch.distributed._composable")


def _listed(function: Any) -> list[Any] | None:
    """The list from which torch made a policy function; None for any other function."""
    if getattr(function, "__module__", "") != torch_checkpoint.__name__:
        return None
    ops = inspect.getclosurevars(function).nonlocals.get("policy_fn_or_list")
    return ops if isinstance(ops, list) else None


@contextmanager
def _ask(function: Any, known: dict[str, Policy], name: str) -> Iterator[None]:
    global _asked
    _asked += 1
    if _asked == _MANY:
        print_once(
            f"ebb: the context_fn of {clipped(name)} gives a new policy in each call, so each call "
            "is as slow as torch's selective checkpointing. Make the context_fn once, or give it "
            "arguments that are equal in each call"
        )
    with from_sac.AskingMode(function) as mode:
        yield
    policy = from_sac.policy_of_answers(mode.answers)
    if policy is not None:
        known[name] = policy


_MANY = 1000  # calls whose policy function ebb asks before it says so
_MOST = 100  # keys in `_policies`
# By key of a context_fn and region name: the policy that its function gave.
_policies: dict[context_keys.Key, dict[str, Policy]] = {}
_asked = 0  # calls whose policy function ebb asked


def _known(context_fn: Any) -> dict[str, Policy]:
    """The policies of a context_fn so far, to which the caller adds."""
    key = context_keys.key_of(context_fn)
    if key is None:
        return {}
    known = _policies.setdefault(key, {})
    if len(_policies) > _MOST:
        with suppress(RuntimeError):  # another thread has added one
            _policies.pop(next(iter(_policies)), None)  # the oldest
    return known


def policy_of_call(
    default: Policy, context_fn: Any, name: str
) -> tuple[Policy, AbstractContextManager[Any]]:
    """The policy for one call of a checkpoint function, and the context to enter in its region.

    Args:
        default: the policy without a `context_fn`.
        name: the region's.
    """
    if context_fn is noop_context_fn:
        return default, nullcontext()
    known = _known(context_fn)
    if name in known:
        return known[name], nullcontext()
    compiled = getattr(context_fn, "compiled", None)
    if isinstance(compiled, _C.Policy):  # Policy.to_sac() made it
        known[name] = Policy._from_compiled(compiled)
        return known[name], nullcontext()
    forward, recompute = context_fn()
    if not torch.is_grad_enabled():
        return default, nullcontext()  # torch does not enter the context either
    if not isinstance(forward, torch_checkpoint._CachingTorchDispatchMode):
        if not isinstance(recompute, nullcontext) and not _is_composables(context_fn):
            _warn_recompute_context()
        return default, forward
    function = forward.policy_fn
    ops = _listed(function)
    if ops is not None:
        known[name] = from_sac.policy_of_list(ops)
        return known[name], nullcontext()
    return from_sac.ASKED, _ask(function, known, name)


def forget() -> None:
    global _asked
    _asked = 0
    _policies.clear()
