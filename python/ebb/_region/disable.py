"""Code without regions."""

from __future__ import annotations

import functools
from contextlib import ContextDecorator, nullcontext
from typing import Any

from torch.compiler import is_dynamo_compiling

from ebb import _C
from ebb._support.job import print_once


def is_switched_off() -> bool:
    """True under ``EBB_DISABLE=1``. Says so once in a job."""
    if not _C.are_disabled_everywhere():
        return False
    _say_so()
    return True


@functools.cache  # a line is looked up in the environment, and programs make many regions
def _say_so() -> None:
    print_once("ebb: EBB_DISABLE=1: regions of the program have no effect")


class disable(_C.Disabled, ContextDecorator):
    """Regions that this thread enters inside have no effect, as if the program had none.

    A context manager and a decorator. Modules that ``ebb.apply`` or ``EBB=1`` made regions run
    as usual, and calls of ``torch.utils.checkpoint`` that ``EBB=1`` takes over checkpoint as torch
    does. Backward of earlier regions still recomputes. ``ebb.plan`` returns a plan without
    regions. Compiled functions keep their regions: under ``torch.compile``, disable has no effect.
    The variable ``EBB_DISABLE=1`` disables all regions, also those of compiled functions.

    Raises:
        RuntimeError: a region is open in this thread.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> handle = ebb.apply(model, modules="*")
        >>> with ebb.disable():
        ...     loss = model(torch.ones(1, 2)).sum()
        >>> loss.backward()
    """

    def __new__(cls) -> Any:
        if is_dynamo_compiling():
            return nullcontext()
        return super().__new__(cls)

    def __init__(self) -> None:
        self._configure()

    def _recreate_cm(self) -> disable:
        return disable()
