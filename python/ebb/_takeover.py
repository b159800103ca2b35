"""Turns torch.utils.checkpoint's calls, and modules by their names, into regions of ebb.

torch's two functions get other code in place, so that whoever imported them early has it too: all
ways to checkpoint (FSDP's wrapper, ``_composable.checkpoint``, Hugging Face's layers) end there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.compiler import is_compiling
from torch.utils.checkpoint import noop_context_fn

from ebb import _from_sac
from ebb._apply import select
from ebb._environment import rank
from ebb._log import log
from ebb._modules import can_mark, mark, marks_of, modules_are_asked_for, number_modules_once
from ebb._names import in_ranges
from ebb._policy import Policy
from ebb._region import name_of, region, run_in_region


class _Taken:
    """What start-up decided; empty if nothing is taken over."""

    policy: Policy | None = None
    text = ""
    patterns: tuple[str, ...] = ()
    announced = False


_taken = _Taken()


def _is_first_process() -> bool:
    return rank() == 0 and multiprocessing.parent_process() is None


def _announce() -> None:
    """One line, in the first process of the job, when something has been taken over."""
    if _taken.announced:
        return
    _taken.announced = True
    log.info("taken over: %s, modules %s", _taken.text, _taken.patterns)
    if not _is_first_process():
        return
    modules = f", modules {','.join(_taken.patterns)}" if _taken.patterns else ""
    print(
        f"ebb: calls of torch.utils.checkpoint are regions{modules} (EBB={_taken.text}); "
        "EBB_DISABLE=1 turns it off",
        file=sys.stderr,
    )


# Calls of torch.utils.checkpoint


def _code_of_checkpoint(*args: Any, **kwargs: Any) -> Any:
    from ebb import _takeover

    return _takeover.run_checkpoint(*args, **kwargs)


def _code_of_generator(
    fn: Any, preserve_rng_state: Any = True, context_fn: Any = None, *args: Any, **kwargs: Any
) -> Any:
    from ebb import _takeover

    if _takeover._is_traced():
        yield from _takeover._TORCHS_GENERATOR(fn, preserve_rng_state, context_fn, *args, **kwargs)
        return
    with _takeover.checkpoint_region(fn, context_fn):
        yield


def _code_of_later_generator(
    fn: Any, args: Any, kwargs: Any, *, context_fn: Any = None, **options: Any
) -> Any:
    from ebb import _takeover

    if _takeover._is_traced():
        yield from _takeover._TORCHS_GENERATOR(fn, args, kwargs, context_fn=context_fn, **options)
        return
    with _takeover.checkpoint_region(fn, context_fn):
        yield


def _copy_of(function: types.FunctionType) -> Callable[..., Any]:
    """What keeps the code that the function has now."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _exchange(function: types.FunctionType, code: types.FunctionType) -> Callable[[], None]:
    """Gives `function` the code of another; returns what undoes it."""
    before = (function.__code__, function.__defaults__, function.__kwdefaults__)
    signature = inspect.signature(function)
    function.__code__, function.__defaults__ = code.__code__, code.__defaults__
    function.__kwdefaults__ = code.__kwdefaults__
    function.__signature__ = signature  # type: ignore[attr-defined]

    def undo() -> None:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__signature__  # type: ignore[attr-defined]

    return undo


_CHECKPOINT: types.FunctionType = inspect.unwrap(torch_checkpoint.checkpoint)
# The function that checkpointing without reentrance ends in; torch 2.15 made another one of it.
_LATER = hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl")
_GENERATOR: types.FunctionType = getattr(
    torch_checkpoint, "_checkpoint_without_reentrant_generator" + ("_impl" if _LATER else "")
)


def _is_traced() -> bool:
    """Also while a graph of Dynamo's is traced, of which only later torch tells `is_compiling`."""
    return is_compiling() or torch._guards.TracingContext.try_get() is not None


# While torch.compile traces it is torch that makes tags of a policy.
_TORCHS_CHECKPOINT, _TORCHS_GENERATOR = _copy_of(_CHECKPOINT), _copy_of(_GENERATOR)
_KEYWORDS = {
    name
    for name, parameter in inspect.signature(_CHECKPOINT).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
} | {"preserve_rng_state"}


def run_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint, in a region. The function is called once, whatever
    `use_reentrant` says.
    """
    if _is_traced():
        return _TORCHS_CHECKPOINT(function, *args, **kwargs)
    given = {key: kwargs.pop(key) for key in _KEYWORDS & kwargs.keys()}
    with checkpoint_region(function, given.get("context_fn")):
        return function(*args, **kwargs)


@contextmanager
def checkpoint_region(function: Callable[..., Any], context_fn: Any) -> Iterator[None]:
    assert _taken.policy is not None
    _announce()
    name = name_of(function)
    policy, inside = _translated(context_fn, name)
    with region(policy, name), inside:
        yield


@functools.cache
def _warn_recompute_context() -> None:
    warnings.warn(
        "ebb: a context_fn gave a context for the recomputation, which is never entered: ebb does "
        "not run the function again, only the operators that backward needs.",
        stacklevel=5,
    )


# By context_fn and region name: what its function answered.
_policies: weakref.WeakKeyDictionary[Any, dict[str, Policy]] = weakref.WeakKeyDictionary()


def _translated(context_fn: Any, name: str) -> tuple[Policy, AbstractContextManager[Any]]:
    """The policy for one call, and what to enter in its region."""
    assert _taken.policy is not None
    if context_fn is None or context_fn is noop_context_fn:
        return _taken.policy, nullcontext()
    known = _known(context_fn)
    if name in known:
        return known[name], nullcontext()
    forward, recompute = context_fn()
    if not isinstance(forward, torch_checkpoint._CachingTorchDispatchMode):
        if not isinstance(recompute, nullcontext) and not _is_composables(context_fn, recompute):
            _warn_recompute_context()
        return _taken.policy, forward
    function = forward.policy_fn
    ops = _listed(function)
    if ops is not None:
        known[name] = _from_sac.policy_of_list(ops)
        return known[name], nullcontext()
    return _from_sac.ASKED, _ask(function, known, name)


def _known(context_fn: Any) -> dict[str, Policy]:
    try:
        return _policies.setdefault(context_fn, {})
    except TypeError:  # it cannot be referred to weakly
        return {}


def _is_composables(context_fn: Any, recompute: Any) -> bool:
    """torch.distributed._composable gives a context that only switches its own hook off."""
    return getattr(context_fn, "__module__", "").startswith("torch.distributed._composable")


def _listed(function: Any) -> list[Any] | None:
    """The list that torch made a policy function of."""
    if getattr(function, "__module__", "") != torch_checkpoint.__name__:
        return None
    ops = inspect.getclosurevars(function).nonlocals.get("policy_fn_or_list")
    return ops if isinstance(ops, list) else None


@contextmanager
def _ask(function: Any, known: dict[str, Policy], name: str) -> Iterator[None]:
    with _from_sac.AskingMode(function) as mode:
        yield
    policy = _from_sac.policy_of_answers(mode.answers)
    if policy is not None:
        known[name] = policy


# Modules by their names


_seen: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
_roots: list[weakref.ref[torch.nn.Module]] = []  # the models that were looked at
_made: list[str] = []  # names of modules that became regions
_hooks: list[Any] = []
_STEPS = 2  # of an optimizer, after which every model of a job has run


def _on_forward(module: torch.nn.Module, _inputs: Any) -> None:
    """The first forward of a model: it has its final shape now."""
    if is_compiling():
        return  # the compiled module around it has been seen
    if _seen.get(id(module)) is not module:
        _look_at(module)


def lightning_callback() -> Any:
    """A callback of Lightning's that looks at a model before it trains."""
    callback: Any = importlib.import_module("lightning.pytorch.callbacks").Callback

    def setup(self: Any, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:
        if _taken.policy is not None and _seen.get(id(pl_module)) is not pl_module:
            _look_at(pl_module)

    return type("Ebb", (callback,), {"setup": setup})()


def _look_at(module: torch.nn.Module) -> None:
    _roots.append(weakref.ref(module))
    for inner in module.modules():
        _seen[id(inner)] = inner
    assert _taken.policy is not None
    if modules_are_asked_for(_taken.policy._compiled):
        number_modules_once(module)
    chosen = select(module, _taken.patterns)
    before = len(_made)
    for name, inner in chosen.items():
        marked = [marks_of(m) for m in inner.modules()]
        if can_mark(inner) and all(marks is None or marks.region is None for marks in marked):
            _announce()
            settings = (_taken.policy, name or type(inner).__name__, "keep")
            mark(inner).region = functools.partial(run_in_region, settings)
            _made.append(name)
            log.info("%s (%s) is a region", name, type(inner).__name__)
    made = _made[before:]
    if made and _is_first_process():
        names = ", ".join(dict.fromkeys(in_ranges(made)))
        what = "module is a region" if len(made) == 1 else "modules are regions"
        print(f"ebb: {len(made)} {what}: {names}", file=sys.stderr)


def _on_optimizer_step(*_: Any) -> None:
    _on_optimizer_step.steps += 1  # type: ignore[attr-defined]
    if _on_optimizer_step.steps < _STEPS:  # type: ignore[attr-defined]
        return
    _drop_hooks()
    if _taken.patterns and not _made:
        models = [model for model in (root() for root in _roots) if model is not None]
        names = [name for model in models for name, _ in model.named_modules() if name]
        shown = list(dict.fromkeys(in_ranges(names)))
        warnings.warn(
            f"ebb: EBB_MODULES={','.join(_taken.patterns)} matches no module. Modules are: "
            f"{', '.join(shown[:20])}{', ...' if len(shown) > 20 else ''}",
            stacklevel=2,
        )


def _drop_hooks() -> None:
    while _hooks:
        _hooks.pop().remove()


_undo: list[Callable[[], None]] = []


def install(policy: Policy, text: str, patterns: tuple[str, ...]) -> None:
    """Takes over from now on.

    Args:
        policy: for calls of torch.utils.checkpoint without a policy of their own, and for modules.
        text: what the user wrote for it.
        patterns: globs over names of modules.
    """
    remove()
    _taken.policy, _taken.text, _taken.patterns = policy, text, patterns
    _undo.append(_exchange(_CHECKPOINT, _code_of_checkpoint))  # type: ignore[arg-type]
    generator = _code_of_later_generator if _LATER else _code_of_generator
    _undo.append(_exchange(_GENERATOR, generator))  # type: ignore[arg-type]
    if patterns or modules_are_asked_for(policy._compiled):
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _on_optimizer_step.steps = 0  # type: ignore[attr-defined]
        _hooks.append(register_module_forward_pre_hook(_on_forward))
        _hooks.append(register_optimizer_step_post_hook(_on_optimizer_step))


def remove() -> None:
    """Gives torch's functions their own code back. Modules that are regions stay so."""
    while _undo:
        _undo.pop()()
    _drop_hooks()
    _taken.policy, _taken.announced = None, False
    _seen.clear()
    _roots.clear()
    _made.clear()
    _policies.clear()
