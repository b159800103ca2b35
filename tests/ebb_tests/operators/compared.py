"""Runs one call in eager and in regions, and compares everything that a program can observe."""

from __future__ import annotations

import contextlib
import copy
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import ebb
from ebb_tests.operators.inputs import parts_of, tensors_of

# Extents: the code that the region contains. If the region computes the inputs, ebb must recompute
# them, too. Otherwise inputs are leaves, and in-place operators write to leaves.
CALL = "the call"
INPUTS = "inputs and call"
EVERYTHING = "inputs, call and backward"
EXTENTS = (CALL, INPUTS, EVERYTHING)

POLICIES = ("recompute_all", "save_all", "random")
RANDOM_POLICIES = 16

NUMBERS = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
MULTIPLIABLE = {torch.bool, *(getattr(torch, name) for name in NUMBERS.split())}

Seen = dict[str, Any]
Plan = list[tuple[str, str]]  # pairs of an extent and a policy's name


def every_way() -> Plan:
    return [(extent, policy) for extent in EXTENTS for policy in POLICIES]


def one_policy_per_extent(turn: int) -> Plan:
    return [(extent, POLICIES[(turn + i) % len(POLICIES)]) for i, extent in enumerate(EXTENTS)]


@functools.cache
def random_policy(seed: int) -> ebb.Policy:
    """A random decision for each overload of torch's operators.

    SAVE for all of its calls or for every second call, or RECOMPUTE.
    """
    rules = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith(("aten::", "prims::")):
            overload = name if "." in name else f"{name}.default"
            draw = zlib.crc32(f"{seed} {overload}".encode()) % 4
            if draw < 3:
                rules.append(ebb.Rule(overload, ebb.SAVE, every=1 + draw // 2))
    return ebb.Policy(rules)


def policy_named(name: str, seed: int) -> ebb.Policy:
    return random_policy(seed) if name == "random" else getattr(ebb.policies, name)


def compare(where: str, call: Call, plan: Plan, tally: Counter[str]) -> bool:
    """Checks that each run of `plan` gives eager's results, and that two eager runs agree.

    Returns True if eager raises.
    """
    expected = call.run()
    assert_same(call.run(), expected, f"{where}: eager does not reproduce itself")
    tally["refused by eager" if "error" in expected else "compared"] += 1
    for extent, policy in plan:
        seed = zlib.crc32(f"{where} {extent}".encode()) % RANDOM_POLICIES
        ebb.reset_stats()
        region = functools.partial(ebb.region, policy_named(policy, seed), "sweep")
        name = f"random_policy({seed})" if policy == "random" else policy
        shown = call.run(region, extent)
        assert_same(shown, expected, f"{where}, a region around {extent}, policy {name}")
        replayed = ebb.stats()["total"]["ops_replayed"]
        assert policy != "save_all" or replayed == 0, f"{where}: save_all recomputed {replayed} ops"
        tally[f"replayed under {policy}"] += replayed
    return "error" in expected


def assert_same(actual: Seen, expected: Seen, where: str) -> None:
    different = {
        what: difference(expected.get(what), actual.get(what))
        for what in {**expected, **actual}
        if expected.get(what) != actual.get(what)
    }
    assert not different, f"{where}: {different}"


def difference(expected: Any, actual: Any) -> Any:
    """The parts that differ; for bytes, the number of different bytes."""
    if isinstance(expected, bytes) and isinstance(actual, bytes):
        count = sum(a != b for a, b in zip(expected, actual, strict=False))
        return f"{count} of {len(expected)} bytes, {len(actual)} there"
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        parts = zip(expected, actual, strict=False)
        return [difference(a, b) for a, b in parts if a != b]
    return f"{actual} instead of {expected}"


class Call:
    """A function and its arguments. Each run uses new copies and the same random numbers.

    Args:
        function: a callable. A module is copied for each run, and its parameters and buffers are
            compared, too.
        args, kwargs: arguments: pytrees that contain tensors.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function = function
        self.arguments = args, kwargs
        self.weights: list[torch.Tensor] = []

    def elements(self) -> int:
        return sum(t.numel() for t in tensors_of(self.arguments))

    def run(
        self,
        region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        extent: str = CALL,
    ) -> Seen:
        seen: Seen = {}
        leaves = Leaves(self.arguments)
        function = copy.deepcopy(self.function)  # copies a module
        torch.default_generator.manual_seed(3)
        with contextlib.ExitStack() as stack:
            try:
                stage = "forward"
                if extent != CALL:
                    stack.enter_context(region())
                args, kwargs = leaves.as_arguments()
                if extent == CALL:
                    stack.enter_context(region())
                outputs = tree_leaves(function(*args, **kwargs))
                see(seen, "output", outputs)
                see(seen, "argument as the call left it", tree_leaves((args, kwargs)))
                results = leaves.used_again(outputs)
                del args, kwargs, outputs  # now only autograd and ebb keep them
                if extent != EVERYTHING:
                    stack.close()
                seen["random state after the call"] = random_state()
                stage = "backward"
                wanted = [t for t in leaves.tensors + state_of(function) if t.requires_grad]
                if results and wanted:
                    grads = torch.autograd.grad(
                        results, wanted, self.weights_of(results), allow_unused=True
                    )
                    # Cloned, since the version depends on whether torch summed gradients in place.
                    see(seen, "gradient", [g if g is None else g.clone() for g in grads])
            except Exception as error:
                seen["error"] = stage, type(error), comparable(str(error), stage)
        seen["random state"] = random_state()
        see(seen, "leaf", leaves.tensors)
        see(seen, "parameter or buffer", state_of(function))
        return seen

    def weights_of(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the results, random. The first run, outside of regions, creates them."""
        for i, result in enumerate(results[len(self.weights) :], start=len(self.weights)):
            wide = torch.complex128 if result.is_complex() else torch.float64
            source = torch.Generator().manual_seed(i)
            weight = torch.randn(result.shape, dtype=wide, generator=source)
            self.weights.append(weight.to(result.dtype))
        return self.weights


class Leaves:
    """Copies of the tensors in a call's arguments, from which a run makes its arguments."""

    def __init__(self, arguments: Any) -> None:
        self.probe = torch.ones(1, dtype=torch.float64, requires_grad=True)
        self.tensors = [self.probe]
        self.numbers: dict[int, int] = {}  # index of each of the caller's tensors, by id()
        self.geometries: list[Any] = [None]
        self.arguments = arguments
        for tensor in tensors_of(arguments):
            if id(tensor) not in self.numbers:
                self.numbers[id(tensor)] = len(self.tensors)
                self.add(tensor)

    def add(self, x: torch.Tensor) -> None:
        leaf, geometry = x.detach().clone(), None
        if x.layout == torch.strided and not same_layout(x, leaf):
            # Copy the whole storage, and apply the geometry of the caller's tensor.
            leaf = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage()).clone()
            geometry = x.shape, x.stride(), x.storage_offset()
        self.tensors.append(leaf.requires_grad_(x.requires_grad))
        self.geometries.append(geometry)

    def as_arguments(self) -> Any:
        """Arguments, computed from the leaves by ops. A tensor that occurs twice stays one."""
        made: dict[int, torch.Tensor] = {}

        def make(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            number = self.numbers[id(x)]
            if number not in made:
                t = self.tensors[number].clone()
                geometry = self.geometries[number]
                made[number] = t if geometry is None else t.as_strided(*geometry)
            return made[number]

        return tree_map(make, self.arguments)

    def used_again(self, outputs: Iterable[Any]) -> list[torch.Tensor]:
        """Multiplies outputs, also masks and indices, so that autograd saves each of them."""
        results = []
        for out in tensors_of(list(outputs)):
            if out.layout != torch.strided:
                results += [out] if out.requires_grad else []
            elif out.requires_grad:
                results.append(out * out)
            elif out.dtype in MULTIPLIABLE:
                results.append(self.probe * out)
        return results


def state_of(function: Any) -> list[torch.Tensor]:
    if not isinstance(function, nn.Module):
        return []
    return [*function.parameters(), *function.buffers()]


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.stride() == b.stride() and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


def see(seen: Seen, what: str, values: Iterable[Any]) -> None:
    for i, value in enumerate(values):
        seen[f"{what} {i}"] = facts(value) if isinstance(value, torch.Tensor) else repr(value)


def facts(x: torch.Tensor) -> tuple[Any, ...]:
    """All properties and bytes of a tensor, read without an op that ebb would record."""
    about = (x.shape, x.dtype, x.layout, x.requires_grad, type(x.grad_fn).__name__, x._version)
    x = x.detach()
    if x.layout == torch.strided:
        return (*about, x.stride(), x.storage_offset(), bytes_of(x))
    return (*about, *map(bytes_of, parts_of(x)))


def bytes_of(x: torch.Tensor) -> bytes:
    if x.is_meta:
        return b""
    x = x.detach().resolve_conj().resolve_neg()
    x = x.reshape(-1) if x.dim() > 64 else x  # numpy's limit
    if x.dtype == torch.bfloat16 or x.dtype not in MULTIPLIABLE:  # numpy lacks these dtypes
        x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
    return x.numpy().tobytes()


def random_state() -> bytes:
    return bytes_of(torch.default_generator.get_state())


def comparable(message: str, stage: str) -> str:
    """An error's message, without the details that ebb adds if a saved tensor was written."""
    return message.split(": [")[0] if stage == "backward" else message
