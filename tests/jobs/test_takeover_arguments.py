"""Errors and warnings of torch.utils.checkpoint about its arguments are the same with ebb."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import ebb
from ebb._launch import checkpoint_calls

mm = torch.ops.aten.mm.default


class Swallows(contextlib.AbstractContextManager):
    def __exit__(self, *_):
        return True


class FailsToEnter(Swallows):
    def __enter__(self):
        raise KeyError("enter")


def product(x, factor=1):
    return (x.mm(x) * factor).sin()


def fails(x):
    raise ZeroDivisionError("in the function")


def called(function=product, args=1, **options):
    """A program that calls checkpoint with these options."""

    def program(x):
        return checkpoint(function, *[x] * args, **options)

    return program


def sequential(*functions, segments=2, **options):
    return lambda x: checkpoint_sequential(list(functions), segments, x, **options)


def under(context, program):
    def inside(x):
        with context():
            return program(x)

    return inside


def contexts(forward, recompute=contextlib.nullcontext):
    return lambda: (forward(), recompute())


def selective(answer):
    return lambda: create_selective_checkpoint_contexts(answer)


PROGRAMS = {
    "no word": called(),
    "no word with a keyword": called(factor=2),
    "no word with a context_fn": called(context_fn=contexts(contextlib.nullcontext)),
    "no function": lambda x: checkpoint(),
    "no arguments": called(args=0, use_reentrant=False),
    "too many arguments": called(args=3, use_reentrant=False),
    "no callable": called(function=None, use_reentrant=False),
    "no callable, reentrant": called(function=7, use_reentrant=True),
}
for reentrant in (True, False, 1, 0, "yes", [], None):
    with_it = functools.partial(called, use_reentrant=reentrant)
    PROGRAMS |= {
        f"{reentrant!r}: {name}": program
        for name, program in {
            "fine": with_it(),
            "a keyword": with_it(factor=2),
            "an unknown keyword": with_it(unknown=2),
            "rng": with_it(preserve_rng_state=False),
            "rng of a wrong type": with_it(preserve_rng_state="no"),
            "debug": with_it(debug=True),
            "debug=1": with_it(debug=1),
            "debug=None": with_it(debug=None),
            "debug and a context_fn": with_it(debug=True, context_fn=selective([mm])),
            "no early stop": with_it(early_stop=False),
            "early stop of a wrong type": with_it(early_stop="never"),
            "determinism": with_it(determinism_check="none"),
            "bogus determinism": with_it(determinism_check="bogus"),
            "determinism without a hash": with_it(determinism_check=[]),
            "determinism None": with_it(determinism_check=None),
            "bogus determinism and debug": with_it(determinism_check="bogus", debug=True),
            "the default context_fn": with_it(context_fn=noop_context_fn),
            "context_fn None": with_it(context_fn=None),
            "context_fn of no pair": with_it(context_fn=lambda: (contextlib.nullcontext(),)),
            "context_fn of None": with_it(context_fn=lambda: None),
            "context_fn of no contexts": with_it(context_fn=lambda: (1, 2)),
            "a context_fn that fails": with_it(context_fn=lambda: {}["context"]),
            "a context that fails": with_it(context_fn=contexts(FailsToEnter)),
            "a list": with_it(context_fn=selective([mm])),
            "a list of no overloads": with_it(context_fn=selective([torch.ops.aten.mm])),
            "a list of strings": with_it(context_fn=selective(["mm"])),
            "neither list nor function": with_it(context_fn=selective((mm,))),
            "a function of too few arguments": with_it(context_fn=selective(lambda: True)),
            "a function that fails": with_it(context_fn=selective(lambda *a, **k: 1 / 0)),
            "a function that answers nothing": with_it(context_fn=selective(lambda *a, **k: None)),
            "a function that answers a list": with_it(context_fn=selective(lambda *a, **k: [])),
            "a function that answers a number": with_it(context_fn=selective(lambda *a, **k: 1)),
            "an exception": with_it(fails),
            "a swallowed exception": with_it(fails, context_fn=contexts(Swallows)),
            "an exception, suppressed": with_it(
                fails, context_fn=contexts(lambda: contextlib.suppress(ZeroDivisionError))
            ),
            "debug for all": under(lambda: set_checkpoint_debug_enabled(True), with_it()),
            "debug for all and a context_fn": under(
                lambda: set_checkpoint_debug_enabled(True), with_it(context_fn=selective([mm]))
            ),
            "debug for nobody and a context_fn": under(
                lambda: set_checkpoint_debug_enabled(False),
                with_it(debug=True, context_fn=selective([mm])),
            ),
            "early stop for nobody": under(lambda: set_checkpoint_early_stop(False), with_it()),
            "sequential": sequential(product, product, use_reentrant=reentrant),
            "sequential rng": sequential(
                product, product, use_reentrant=reentrant, preserve_rng_state=False
            ),
            "sequential keyword": sequential(product, use_reentrant=reentrant, debug=False),
            "sequential exception": sequential(fails, product, use_reentrant=reentrant),
            "sequential of no segments": sequential(product, segments=0, use_reentrant=reentrant),
            "sequential of too many": sequential(product, segments=3, use_reentrant=reentrant),
        }.items()
    }


def outcome(program):
    """What the program raises, or its gradient, and what it warns of."""
    logs = logging.getLogger(
        "LoggingTensor"
    )  # pytest's handlers cannot format what debug=True logs
    logs.propagate = False
    logs.handlers.clear()
    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            y = program(x)
            y.sum().backward()
            result = [y.detach(), x.grad]
        except Exception as error:
            result = [type(error), str(error)]
    # that a context is not entered again is ebb's own to tell
    told = [
        w
        for w in warned
        if "recomputation context that a context_fn returned is ignored" not in str(w.message)
    ]
    # an older torch's function is called by ebb's, which is the line that its warning names
    where = [(w.filename, w.lineno) if checkpoint_calls._TELLS_GENERATOR else () for w in told]
    return result, [(w.category, str(w.message), at) for w, at in zip(told, where, strict=True)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_checkpoint_raises_and_warns_as_torch_does(take_over, name):
    expected, warned = outcome(PROGRAMS[name])
    take_over()

    found, warned_here = outcome(PROGRAMS[name])

    assert not ebb._C.in_region()

    assert len(found) == len(expected)
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )
    assert warned_here == warned


def test_context_is_not_entered_without_gradients(taken):
    entered = []

    class Context(contextlib.AbstractContextManager):
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *_):
            pass

    with torch.no_grad():
        checkpoint(product, torch.ones(2, 2), use_reentrant=False, context_fn=contexts(Context))

    assert not entered


def test_exception_leaves_the_region_where_torch_does_not_tell_its_generator(taken, monkeypatch):
    """torch before 2.13."""

    def older(function, *args, use_reentrant=None):
        gen = torch.utils.checkpoint._checkpoint_without_reentrant_generator(function, *args[:0])
        next(gen)
        return function(*args)

    kept = []

    def program():
        try:
            checkpoint_calls._leaving_its_generator(fails, torch.ones(2))
        except ZeroDivisionError as error:
            kept.append(error)  # and its traceback with what it holds

    monkeypatch.setattr(checkpoint_calls, "_TORCHS_CHECKPOINT", older)
    program()

    assert kept
    assert not ebb._C.in_region()
    with pytest.raises(TypeError):
        checkpoint_calls._leaving_its_generator(use_reentrance=True)


def test_subclass_of_torchs_function_runs_as_it_is(taken):
    class Own(torch.utils.checkpoint.CheckpointFunction):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    x = torch.ones(2, requires_grad=True)
    Own.apply(x).sum().backward()

    assert torch.equal(x.grad, torch.full((2,), 3.0))
