"""Fake devices and policies for tests and benchmarks, and ebb's facts about operators.

All of this uses the module ebb._testing, which is built from `tests/native`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebb import offload
from ebb._policy.policy import Policy

try:
    from ebb import _testing
except ImportError as error:
    raise ImportError("ebb was built without its test module: make setup") from error


def failing_policy(at: int) -> Policy:
    """Recomputes everything, and makes a region's `at`-th op (from 1) raise before it runs.

    Args:
        at: number of the op; views are not counted. Each region counts for itself.

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
    """What ebb takes an operator for.

    Returns:
        ``kind``: "recorded", "in-place view" or "passes through"; ``uses``: by argument that holds
        tensors, "read", "write", "overwrite", "scratch" or "unread"; ``counted``: by argument,
        whether torch moves its version when the operator writes it; ``random``;
        ``never_replayed``.

    Examples:
        >>> operator_facts(torch.ops.aten.add_.Tensor)["uses"]
        {'self': 'write', 'other': 'read'}
    """
    overload = "" if op._overloadname == "default" else op._overloadname
    return _testing.operator_facts(op._schema.name, overload)


@contextmanager
def fake_accelerator(
    host_bytes: int = 1 << 40, *, min_bytes: int = 0, **settings: Any
) -> Iterator[_testing.FakeAccelerator]:
    """Lets CPU tensors count as tensors of a device, whose copies run when the test says so.

    In the with-block values with the decision OFFLOAD are copied by a fake that runs a copy when
    :meth:`advance` is called, or at the last moment: when a stream or the host waits for it. It
    reports every copy that nothing orders, and every copy that finds its memory freed. At the end
    all copies are run, and the settings are what they were.

    Args:
        host_bytes: pinned memory that the host has.
        min_bytes, settings: for :func:`ebb.offload.configure`.

    Raises:
        AssertionError: at the end, there was a violation.
    """
    before = offload.configure()
    fake = _testing.FakeAccelerator(host_bytes)
    offload.configure(min_bytes=min_bytes, **settings)
    try:
        yield fake
        _testing.drain_offload()
        violations = fake.take_violations()
        assert not violations, violations
    finally:
        fake.close()
        offload.configure(**before)


@contextmanager
def instant_accelerator(
    *, min_bytes: int = 0, **settings: Any
) -> Iterator[_testing.InstantAccelerator]:
    """Lets CPU tensors count as tensors of a device, whose copies are done at once.

    For measurements: there is no driver, so what offloading costs is the engine's own.

    Args:
        min_bytes, settings: for :func:`ebb.offload.configure`.
    """
    before = offload.configure()
    instant = _testing.InstantAccelerator()
    offload.configure(min_bytes=min_bytes, **settings)
    try:
        yield instant
    finally:
        instant.close()
        offload.configure(**before)
