"""Comparing a program in a region with plain eager, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ebb
from ebb import _testing
from ebb_tests import TESTS
from ebb_tests import device as late
from ebb_tests.stand_ins import fake_accelerator

Program = Callable[..., "torch.Tensor | Sequence[torch.Tensor]"]
Test = Callable[..., None]

POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_all": ebb.policies.save_all,
    "save_matmuls": ebb.policies.save_matmuls,
    "torchtitan": ebb.policies.torchtitan,
    "mixed": ebb.Policy(
        {"aten::mul": ebb.SAVE, "aten::add_": ebb.SAVE, "aten::sin": ebb.SAVE, "aten::e*": ebb.SAVE}
    ),
}

FILES = (
    "rule*",
    "regressions",
    "pieces_of_one_storage",
    "memory",
    "functions_and_hooks",
    "handles",
    "subclasses",
    "opaque",
)
LEAST_TESTS = 215  # exactness tests that run on each device
SANITIZED = "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ
MARKS = "not (once or not_sanitized)" if SANITIZED else "not once"
PYTEST = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS
OFFLOADING = "EBB_TEST_OFFLOAD" in os.environ  # see test_offload_exactness.py
PAGING = "EBB_TEST_PAGING" in os.environ  # see test_paging_exactness.py
EACH_TIME = "EBB_TEST_EACH_TIME" in os.environ  # see test_each_time_exactness.py
DEVICE = os.environ.get("EBB_TEST_DEVICE", "cpu")  # see test_late_device.py
KEY = "CPU" if DEVICE == "cpu" else "PrivateUse1"  # dispatch key of the device's kernels

FAILING = "EBB_TEST_FAILING" in os.environ  # allocations fail: see test_random_programs.py
AHEAD = os.environ.get("EBB_TEST_AHEAD")  # see test_ahead_exactness.py

if FAILING:
    ebb._C.keep_while_there_is_room(1 << 60)
if AHEAD:
    ebb.config.ahead.regions = 2
    if AHEAD == "at once":
        _testing.replay_when_closed(True)
        _testing.delay_replays_ahead(50)

if DEVICE != "cpu":
    late.load()
    late.have_pages()
    torch.set_default_device(DEVICE)

# With offloading or paging, these replace SAVE, which would test less.
KEEPING = ebb.PAGE if PAGING else ebb.OFFLOAD if OFFLOADING else ebb.SAVE

if OFFLOADING or PAGING:
    kind = "page" if PAGING else "offload"
    mixed = dict.fromkeys(("aten::mul", "aten::add_", "aten::e*"), KEEPING)
    POLICIES = {
        f"{kind}_all": ebb.Policy(default=KEEPING, inputs=KEEPING),
        **({} if PAGING else {"offload_inputs": ebb.policies.offload_inputs}),
        f"{kind}_mixed": ebb.Policy({**mixed, "aten::mm": ebb.SAVE}, inputs=KEEPING),
    }

if EACH_TIME:
    POLICIES = {
        "each_time": ebb.Policy(default=ebb.RECOMPUTE_EACH_TIME),
        "some_held": ebb.Policy(
            [ebb.Rule("*", ebb.RECOMPUTE, every=3)],
            default=ebb.RECOMPUTE_EACH_TIME,
            inputs=KEEPING,
        ),
        "writes_held": ebb.Policy({"aten::*_": ebb.RECOMPUTE}, default=ebb.RECOMPUTE_EACH_TIME),
        "writes_each_time": ebb.Policy({"aten::*_": ebb.RECOMPUTE_EACH_TIME}),
        "some_kept": ebb.Policy(
            {
                "aten::mul": KEEPING,
                "aten::add_": ebb.RECOMPUTE,
                "aten::sin": ebb.RECOMPUTE,
                "aten::e*": KEEPING,
            },
            default=ebb.RECOMPUTE_EACH_TIME,
        ),
    }


def accelerator() -> contextlib.AbstractContextManager[object]:
    """The device for OFFLOAD that EBB_TEST_OFFLOAD names.

    Fake accelerators: "prompt" runs copies at once, "late" as late as possible. "disk": the
    disk tier. "device": the device of EBB_TEST_DEVICE.
    """
    match os.environ.get("EBB_TEST_OFFLOAD"):
        case None:
            return contextlib.nullcontext()
        case "prompt":
            return fake_accelerator(in_flight_bytes=0)
        case "disk":
            return disk_tier()
        case "device":
            return offload_settings(min_bytes=1)
        case _:
            return fake_accelerator(in_flight_bytes=1 << 40)


def is_harmless(finding: str) -> bool:
    """True for a write during a copy to the host that nothing will read.

    Backward may need a value before its copy is done. The value then stays on the device and may
    be written. A needed copy would give wrong bits, since streams run as late as possible.
    """
    return OFFLOADING and finding.startswith("read and write: copy to host")


@contextlib.contextmanager
def offload_settings(**settings: object) -> Iterator[None]:
    with ebb.config.patch({f"offload.{name}": value for name, value in settings.items()}):
        yield


@contextlib.contextmanager
def disk_tier() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, offload_settings(disk=folder, min_bytes=0):
        yield


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
    return [t.to(DEVICE).requires_grad_() for t in drawn]


def run(
    program: Program,
    inputs: Iterable[torch.Tensor],
    policy: ebb.Policy | None,
    after: Callable[..., None] | None = None,
) -> list[torch.Tensor | None]:
    """The outputs of `program` and the gradients of `inputs`. `policy` None: eager."""
    if not PAGING or policy is None:
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
        if PAGING:
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
    policies: Mapping[str, ebb.Policy] = POLICIES,
    after: Callable[..., None] | None = None,
) -> None:
    """Checks that `program` gives eager's bits in a region under each policy."""
    inputs = list(inputs)
    expected = run(program, inputs, None, after)
    for name, policy in policies.items():
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

    Without policies: under each of `POLICIES`. The program may enter the context several times, one
    after the other, and return tensors in lists and tuples.
    """
    torch.manual_seed(1)
    expected = tree_leaves(program(contextlib.nullcontext()))
    for policy in policies or POLICIES.values():
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
    """Like `like_eager()`, with a case for each of `POLICIES`."""

    def test(policy: str, **parameters: object) -> None:
        assert_like_eager(functools.partial(program, **parameters), POLICIES[policy])

    return pytest.mark.parametrize("policy", POLICIES)(_as_test(test, program, 1, "policy"))


def assert_same_error(
    program: Program, inputs: Iterable[torch.Tensor], after: Callable[..., None] | None = None
) -> str:
    """Checks that eager and each policy raise RuntimeError. Returns the last message."""
    inputs = list(inputs)
    message = error_of(program, inputs, None, after)
    assert message is not None, "eager itself does not raise"
    for name, policy in POLICIES.items():
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


def find_tests(*names: str) -> list[str]:
    """All files test_NAME.py outside of accelerator folders. Each name must have a file."""
    files = {
        name: [str(f) for f in TESTS.rglob(f"test_{name}.py") if f.parent.name != "accelerator"]
        for name in names
    }
    assert all(files.values())
    return sorted(file for found in files.values() for file in found)


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


def run_random_programs(count: int, base: int | None = None, **environment: str) -> Counter[str]:
    """Runs random programs with these variables. Returns the number of programs by outcome.

    In a process of its own: hypothesis also draws constants that it finds in loaded modules. Which
    programs a seed gives must not depend on the tests that ran before.
    """
    script = str(TESTS / "core" / "test_random_programs.py")
    command = ["-W", "ignore", script, str(count), *([] if base is None else [str(base)])]
    path = os.pathsep.join(sys.path)
    return Counter(json.loads(run_process(command, PYTHONPATH=path, **environment)))


def assert_tests_of_exactness_pass(*more: str, **environment: str) -> None:
    """Runs the exactness tests and the tests of `more` with these variables.

    Skips tests with the marker `once`.
    """
    printed = run_process([*PYTEST, *find_tests(*FILES, *more)], **environment)
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed[-3000:]
    assert int(passed[1]) > LEAST_TESTS + 25 * len(more), printed[-3000:]


def assert_rules_hold_in_verify_mode(*but: str, **environment: str) -> None:
    """Runs the tests of the rules in verify mode, except tests with one of `but` in their names."""
    # Two tests do not hold in verify mode:
    # 1. A backward writes to a saved tensor without a version change. Verify mode reports it, as
    #    gradients depend on how long that tensor is alive.
    # 2. A recomputed tensor is freed right after its function. Verify mode frees it later.
    but = ("overwrites_what_several_unpack", "gone_after_its_function", *but)
    deselected = ("-k", " and ".join(f"not {name}" for name in but))
    files = find_tests("rule*", "regressions", "handles")
    run_process([*PYTEST, *files, *deselected], EBB_VERIFY="1", **environment)
