"""Turns calls of torch.utils.checkpoint into regions of ebb.

All ways of checkpointing, such as FSDP's wrapper, ``_composable.checkpoint`` and Hugging Face's
layers, end in the same inner functions of torch, and ebb replaces these. The generator of
non-reentrant checkpoints gets new code in place, so code that imported it early uses the new code
too. The autograd function of reentrant checkpoints gets another ``apply``. torch's own checks of
arguments still run.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.compiler import is_compiling
from torch.utils.checkpoint import noop_context_fn

from ebb import _C
from ebb._launch.assignment import TORCHS, Assignment
from ebb._launch.budgeted import CallAround
from ebb._region import outer_hooks
from ebb._region.context_fn import forget, policy_of_call
from ebb._region.region import checkpointed, name_of


def copy_of(function: types.FunctionType) -> Callable[..., Any]:
    """A copy that keeps the function's current code."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _code_of_all(*args: Any, _ebb_instead: Callable[..., Any], **kwargs: Any) -> Any:
    """The code of each replaced function. Uses no globals, since it runs with those of torch or of
    a framework."""
    return _ebb_instead(*args, **kwargs)


def exchange(function: types.FunctionType, instead: Callable[..., Any]) -> Callable[[], None]:
    """Make `function` call `instead`; return a function that undoes it."""
    before = (function.__defaults__, function.__code__, function.__kwdefaults__)
    signature = inspect.signature(function)
    function.__kwdefaults__ = {"_ebb_instead": instead}
    # Each function has a code object of its own, since Dynamo caches by code object.
    function.__code__ = _code_of_all.__code__.replace(co_name=function.__name__)
    function.__defaults__ = None
    function.__signature__ = signature  # type: ignore[attr-defined]

    def undo() -> None:
        function.__defaults__, function.__code__, function.__kwdefaults__ = before
        del function.__signature__  # type: ignore[attr-defined]

    return undo


_FUNCTION = torch_checkpoint.CheckpointFunction  # unsloth puts another in its place
_CHECKPOINT: types.FunctionType = inspect.unwrap(torch_checkpoint.checkpoint)
# The generator function to which non-reentrant `checkpoint` delegates. Since torch 2.15, it is the
# function with the suffix `_impl`.
_LATER = hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl")
_GENERATOR: types.FunctionType = getattr(
    torch_checkpoint, "_checkpoint_without_reentrant_generator" + ("_impl" if _LATER else "")
)


def _is_traced() -> bool:
    """True under torch.compile, also while a Dynamo graph is traced, which only later versions of
    torch report in `is_compiling`."""
    return is_compiling() or torch._guards.TracingContext.try_get() is not None


def runs_original() -> bool:
    """True if the replaced function itself runs: under torch.compile, and under ebb.disable()."""
    return _C.regions_are_disabled() or _is_traced()


# Under torch.compile, torch's own functions turn a policy into tags of the graph.
_TORCHS_CHECKPOINT, _TORCHS_GENERATOR = copy_of(_CHECKPOINT), copy_of(_GENERATOR)
_TORCHS_APPLY: Any = torch.autograd.Function.__dict__["apply"]  # written in C since torch 2.15
# True if torch forwards an exception of the function to its generator, as torch 2.13 and later do.
_TELLS_GENERATOR = _LATER or "throw" in _CHECKPOINT.__code__.co_names


def _leaving_its_generator(*args: Any, **kwargs: Any) -> Any:
    """Call torch's checkpoint. If it raises, close its generator at once: else the region would
    stay open for as long as the traceback exists."""
    try:
        return _TORCHS_CHECKPOINT(*args, **kwargs)
    except BaseException as error:
        here = error.__traceback__
        inside = here and here.tb_next  # the frame of torch's function, if it has begun
        generator = inside and inside.tb_frame.f_locals.get("gen")
        if generator:
            generator.close()
        del here, inside, generator  # they refer to this frame
        raise


def _generator(
    fn: Any,
    preserve_rng_state: Any = True,
    context_fn: Any = noop_context_fn,
    determinism_check: Any = "default",
    debug: Any = False,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    given = (fn, preserve_rng_state, context_fn, determinism_check, debug, *args)
    torchs = functools.partial(_TORCHS_GENERATOR, *given, **kwargs)
    return _in_region(torchs, fn, args, context_fn, determinism_check, debug)


def _later_generator(
    fn: Any,
    args: Any,
    kwargs: Any,
    *,
    context_fn: Any = noop_context_fn,
    determinism_check: Any = "default",
    debug: Any = False,
    **options: Any,
) -> Iterator[None]:
    options |= {"context_fn": context_fn, "determinism_check": determinism_check, "debug": debug}
    torchs = functools.partial(_TORCHS_GENERATOR, fn, args, kwargs, **options)
    return _in_region(torchs, fn, args, context_fn, determinism_check, debug)


def _in_region(
    torchs: Callable[[], Iterator[None]],
    function: Callable[..., Any],
    arguments: Any,
    context_fn: Any,
    determinism_check: Any,
    debug: Any,
) -> Iterator[None]:
    """Runs in a region what the caller does between two steps. `torchs`: torch's own generator."""
    if runs_original():
        if _assignment is not None and _is_traced():
            _assignment.has_calls_in_graphs = True
        yield from torchs()
        return
    if determinism_check not in ("default", "none") or (
        debug or torch_checkpoint._checkpoint_debug_enabled
    ):
        # With gradients disabled, torch's generator raises errors for its arguments and does
        # nothing else.
        with torch.no_grad():
            next(torchs())
    outer, inner = region_of_call(function, arguments, context_fn)
    with outer, inner:
        yield


def _run_reentrant(cls: Any, *given: Any) -> Any:
    """CheckpointFunction.apply in a region: calls the function once, with gradients."""
    if cls is not _FUNCTION or runs_original():
        return _TORCHS_APPLY.__get__(None, cls)(*given)
    function, _preserve_rng_state, *args = given
    outer, inner = region_of_call(function, args)
    with outer, inner:
        return function(*args)


_assignment: Assignment | None = None  # while ebb takes calls over


class _InRegion:
    """A context in the region of a call whose inputs hooks have saved."""

    def __init__(self, inputs: _C.HookedInputs, inside: AbstractContextManager[Any]) -> None:
        self._inputs = inputs
        self._inside = inside

    def __enter__(self) -> None:
        self._inputs.enter_region()
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.__exit__(*error)


# Returns contexts, and is no generator-based context manager. If a signal handler raised in such a
# generator, the region could stay open until the frames that refer to the generator are freed.
def region_of_call(
    function: Callable[..., Any],
    arguments: Iterable[Any],
    context_fn: Any = noop_context_fn,
    source: str = TORCHS,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The region of a function that `source` checkpoints, and the context to enter in it. The
    caller must enter both: hooks around the call have saved its arguments."""
    assignment = _assignment
    assert assignment is not None
    assignment.announce(source)
    blocks = assignment.blocks
    if blocks is not None and blocks.exclude(function):
        return nullcontext(), nullcontext()
    name = name_of(function)
    policy, inside = policy_of_call(assignment.policy, context_fn, name)
    if blocks is not None:
        inside = CallAround(blocks, function, inside)
    inputs = outer_hooks.save_inputs(arguments)
    return checkpointed(policy, name), _InRegion(inputs, inside) if inputs else inside


def take_over(assignment: Assignment, undo: ExitStack) -> None:
    """Make calls of torch.utils.checkpoint regions until `undo` is closed."""
    global _assignment
    _assignment = assignment
    undo.callback(_forget)
    _FUNCTION.apply = classmethod(_run_reentrant)  # type: ignore[assignment, method-assign]
    undo.callback(delattr, _FUNCTION, "apply")
    if not _TELLS_GENERATOR:
        undo.callback(exchange(_CHECKPOINT, _leaving_its_generator))
    undo.callback(exchange(_GENERATOR, _later_generator if _LATER else _generator))


def _forget() -> None:
    global _assignment
    _assignment = None
    forget()
