"""Fake devices and policies for tests and benchmarks, and how ebb classifies operators.

All of this uses the module ebb._testing, which is built from `tests/native`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ebb
from ebb._policy.policy import Policy

try:
    from ebb import _testing
except ImportError as error:
    raise ImportError("ebb was built without its test module: make setup") from error


def failing_policy(at: int) -> Policy:
    """Recomputes everything, and makes a region's `at`-th op (from 1) raise before it runs.

    Args:
        at: number of the op, counted from the start of each region, without views.

    Examples:
        >>> with ebb.region(failing_policy(2)):
        ...     y = torch.zeros(2).exp()
        Traceback (most recent call last):
        ...
        RuntimeError: ebb: fault injected before aten::exp.default
    """
    if at < 1:
        raise ValueError(f"ebb: at must be 1 or more; got {at}")
    return Policy._from_compiled(_testing.failing_policy(at))


def operator_facts(op: torch._ops.OpOverload) -> dict[str, Any]:
    """How ebb classifies an operator.

    Returns:
        ``kind``: "recorded", "in-place view" or "passes through". ``uses``: for each tensor
        argument "read", "write", "overwrite", "scratch" or "unread". ``counted``: for each
        argument, True if torch increments its version when the operator writes it. ``random``:
        True if it draws random numbers. ``never_replayed``: True if ebb saves its results.

    Examples:
        >>> operator_facts(torch.ops.aten.add_.Tensor)["uses"]
        {'self': 'write', 'other': 'read'}
    """
    overload = "" if op._overloadname == "default" else op._overloadname
    return _testing.operator_facts(op._schema.name, overload)


@contextmanager
def kernel(name: str, function: Callable[..., object], key: str = "CPU") -> Iterator[None]:
    """In the with-block, `function` is the kernel of torch's operator aten::`name`."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that another kernel was there
            library.impl(name, function, key)
        yield


def _change(**settings: Any) -> None:
    ebb.config.update({f"offload.{name}": value for name, value in settings.items()})


@contextmanager
def fake_accelerator(
    host_bytes: int = 1 << 40, *, min_bytes: int = 0, **settings: Any
) -> Iterator[_testing.FakeAccelerator]:
    """Treats CPU tensors as tensors of a fake device whose copies the test controls.

    In the with-block, a copy of OFFLOAD runs when the test calls :meth:`advance`, or as late as
    possible: when a stream or the host waits for it. The fake reports copies without stream order
    and copies from or to freed memory. The end runs all copies and restores the settings.

    Args:
        host_bytes: bytes of pinned memory that the host has.
        min_bytes, settings: of ``ebb.config.offload``.

    Raises:
        AssertionError: at the end, if the fake has reported a copy.
    """
    before = ebb.config.to_dict()
    fake = _testing.FakeAccelerator(host_bytes)
    _change(min_bytes=min_bytes, **settings)
    try:
        yield fake
        _testing.drain_offload()
        fake.advance(1 << 60)
        violations = fake.take_violations()
        assert not violations, violations
    finally:
        fake.close()
        ebb.config.update(before)


@contextmanager
def instant_accelerator(
    *, min_bytes: int = 0, **settings: Any
) -> Iterator[_testing.InstantAccelerator]:
    """Treats CPU tensors as tensors of a fake device whose copies complete at once.

    For measurements of the offload engine's own time, without a driver.

    Args:
        min_bytes, settings: of ``ebb.config.offload``.
    """
    before = ebb.config.to_dict()
    instant = _testing.InstantAccelerator()
    _change(min_bytes=min_bytes, **settings)
    try:
        yield instant
    finally:
        instant.close()
        ebb.config.update(before)
