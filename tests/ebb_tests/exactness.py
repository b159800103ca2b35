"""Comparing a program in a region with plain eager, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ebb
from ebb_tests import TESTS
from ebb_tests.engines import PLAIN, Policies, current

Program = Callable[..., "torch.Tensor | Sequence[torch.Tensor]"]
Test = Callable[..., None]

POLICIES = PLAIN.policies  # for modules without the mark `engines`; others call `policies`
each_policy = pytest.mark.each_policy

SANITIZED = "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ
MARKS = "not (once or not_sanitized)" if SANITIZED else "not once"
PYTEST = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS


def policies() -> Policies:
    """The policies of the engine under which the running test runs."""
    return current().policies


def resident_kib() -> int:
    """Resident memory of this process in KiB."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """True if both have the same bits (so NaN equals NaN), or both are None."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, on the CPU."""
    flat = torch.empty(t.numel(), dtype=t.dtype, device="cpu").copy_(t.detach().reshape(-1))
    return flat.view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(7)
    drawn = [torch.randn(s, dtype=dtype, generator=generator, device="cpu") for s in shapes]
    return [t.to(current().device).requires_grad_() for t in drawn]


def run(
    program: Program,
    inputs: Iterable[torch.Tensor],
    policy: ebb.Policy | None,
    after: Callable[..., None] | None = None,
) -> list[torch.Tensor | None]:
    """The outputs of `program` and the gradients of `inputs`. `policy` None: eager."""
    if not current().pages or policy is None:
        return run_once(program, inputs, policy, after)
    inputs = list(inputs)
    ebb.experimental.paging.reset()
    run_once(program, inputs, policy, after)  # records a step, which sizes the page pools
    results = run_once(program, inputs, policy, after)
    assert ebb.experimental.paging.step_ok()
    return results


def mark_all_rows(tensors: Iterable[torch.Tensor]) -> None:
    """Marks all rows as valid. Tensors with the same number of rows share the count tensor."""
    counts: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        rows = len(tensor) if tensor.dim() > 0 else 0
        with contextlib.suppress(ValueError):  # views, and marked tensors that were read
            ebb.experimental.mark_rows(tensor, counts.setdefault(rows, torch.tensor(rows)))


def run_once(
    program: Program,
    inputs: Iterable[torch.Tensor],
    policy: ebb.Policy | None,
    after: Callable[..., None] | None = None,
) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    region = ebb.region(policy, "test") if policy is not None else contextlib.nullcontext()
    with region:
        if current().pages:
            mark_all_rows(inputs)
        outputs = program(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    results: list[torch.Tensor | None] = [o.detach().clone() for o in outputs]
    if after is not None:
        after(*inputs, *outputs)
    differentiable = [o for o in outputs if o.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    torch.manual_seed(2)
    weights = [torch.randn_like(o) for o in differentiable]
    results += torch.autograd.grad(differentiable, wanted, weights, allow_unused=True)
    results.append(torch.rand(1))  # compares the random state afterwards
    return results


def assert_exact(
    program: Program,
    inputs: Iterable[torch.Tensor],
    policies: Policies | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Checks that `program` gives eager's bits in a region under each policy.

    Without policies: under each of the engine's.
    """
    inputs = list(inputs)
    expected = run(program, inputs, None, after)
    for name, policy in (policies or current().policies).items():
        actual = run(program, inputs, policy, after)
        assert len(actual) == len(expected)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert same_bits(a, e), f"policy {name}: result {i} differs: {a} instead of {e}"


def _as_test(run: Test, program: Callable[..., object], own: int, *more: str) -> Test:
    """Makes `run` a test. pytest gives it `more` and the program's parameters after `own` first."""
    names = (*more, *[*inspect.signature(program).parameters][own:])
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = program.__doc__
    return run


def exact(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> Callable[[Program], Test]:
    """Makes a program a test: `assert_exact` of the program, on leaves of these shapes.

    The program's first parameters are the leaves; pytest gives the others, as to any test.
    """

    def make_test(program: Program) -> Test:
        def test(**parameters: object) -> None:
            assert_exact(functools.partial(program, **parameters), leaves(*shapes, dtype=dtype))

        return _as_test(test, program, len(shapes))

    return make_test


def assert_like_eager(
    program: Callable[[contextlib.AbstractContextManager[object]], object],
    *policies: ebb.Policy,
) -> None:
    """Checks that `program` returns eager's bits when the context that it gets is a region.

    Without policies: under each of the engine's. The program may enter the context several times,
    one after the other, and return tensors in lists and tuples.
    """
    torch.manual_seed(1)
    expected = tree_leaves(program(contextlib.nullcontext()))
    for policy in policies or current().policies.values():
        torch.manual_seed(1)
        found = tree_leaves(program(ebb.region(policy, "block")))
        assert len(found) == len(expected)
        for i, (a, e) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(a, e), f"{policy}: result {i} differs: {a} instead of {e}"


def like_eager(*policies: ebb.Policy) -> Callable[[Callable[..., object]], Test]:
    """Makes a program a test: `assert_like_eager` of the program under these policies.

    The program's first parameter is the region; pytest gives the others, as to any test.
    """

    def make_test(program: Callable[..., object]) -> Test:
        def test(**parameters: object) -> None:
            assert_like_eager(functools.partial(program, **parameters), *policies)

        return _as_test(test, program, 1)

    return make_test


def like_eager_each(program: Callable[..., object]) -> Test:
    """Like `like_eager()`, with a case for each of the engine's policies."""

    def test(policy: ebb.Policy, **parameters: object) -> None:
        assert_like_eager(functools.partial(program, **parameters), policy)

    return each_policy(_as_test(test, program, 1, "policy"))


def assert_same_error(
    program: Program, inputs: Iterable[torch.Tensor], after: Callable[..., None] | None = None
) -> str:
    """Checks that eager and each policy raise RuntimeError. Returns the last message."""
    inputs = list(inputs)
    message = error_of(program, inputs, None, after)
    assert message is not None, "eager itself does not raise"
    for name, policy in policies().items():
        message = error_of(program, inputs, policy, after)
        assert message is not None, f"policy {name} does not raise where eager does"
    return message


def error_of(
    program: Program,
    inputs: Iterable[torch.Tensor],
    policy: ebb.Policy | None,
    after: Callable[..., None] | None = None,
) -> str | None:
    try:
        run(program, inputs, policy, after)
    except RuntimeError as error:
        return str(error)
    return None


def replayed() -> int:
    return ebb.stats()["total"]["ops_replayed"]


def run_process(command: Sequence[str], **environment: str) -> str:
    """Runs Python with these variables. Returns what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    return done.stdout
