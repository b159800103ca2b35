"""Every operator in torch's own database, in a region, bit for bit as in eager.

The fast run takes two samples of each operator and dtype, `make sweep` at most 50, `make test-full`
all. The last two also run samples of all dtypes under several fills of new memory: eager must give
the same bits.

Operators without a derivative are swept too: what they return, masks and indices and random
numbers, is what other operators save.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed

import ebb
from ebb_tests.memory_fills import new_memory_filled_with
from ebb_tests.operators import compared
from ebb_tests.operators.compared import (
    Call,
    assert_same,
    compare,
    every_way,
    one_policy_per_extent,
)
from ebb_tests.operators.database import ON_THE_CPU, differentiable, dtypes_of, name_of, samples_of
from ebb_tests.operators.inputs import tensors_of

# Operators that eager does not reproduce, and why. Under use_deterministic_algorithms torch fills
# new memory, and eager reproduces them too: that is where they are swept.
READS_NEW_MEMORY = "returns memory that nothing has written"
NOT_REPRODUCED = {
    "linalg.lstsq": "the driver gelsy reads pivots from memory that nothing has written",
    "empty": READS_NEW_MEMORY,
    "empty_like": READS_NEW_MEMORY,
    "empty_permuted": READS_NEW_MEMORY,
    "empty_strided": READS_NEW_MEMORY,
    "new_empty": READS_NEW_MEMORY,
    "new_empty_strided": READS_NEW_MEMORY,
}

# Operators that the database has for the CPU, though eager has none there: each sample is refused.
NOT_ON_THE_CPU = {
    "jiterator_unary",
    "jiterator_binary",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary_return_by_ref",
    "jiterator_2inputs_2outputs",
}

# Differentiable operators of whose first results nothing is recomputed, and why.
NOTHING_TO_RECOMPUTE = {
    "nn.functional.linear_cross_entropy-chunked": "its result is written chunk by chunk",
    "normal-number_mean": "without a tensor among its arguments torch does not show it to ebb",
    "to_sparse": "its result is sparse, and sparse tensors are kept whole",
}

LARGE = 10_000  # elements: these get fewer runs, since three of them take as long as all others


WITH_DTYPES = [
    pytest.param(op, dtype, id=f"{name_of(op)}-{str(dtype).removeprefix('torch.')}")
    for op in ON_THE_CPU
    for dtype in dtypes_of(op)
]
# Samples in the database, for each dtype, that `make sweep` takes. All of them would take an hour:
# max_pool2d alone has hundreds that differ little.
MANY, SOME = 50, 8
SLOW = {"grid_sampler_3d"}  # each sample takes seconds


def some(most: int, op, dtype) -> list:
    """At most so many samples, from all parts of the list."""
    samples = list(samples_of(op, dtype))
    most = -(-most // 8) if op.name in SLOW else most
    return samples[:: -(-len(samples) // most) or 1]


def first_two(op, dtype) -> Iterator:
    return itertools.islice(samples_of(op, dtype), 2)


def some_or_all(most: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "choose",
        [
            pytest.param(functools.partial(some, most), marks=pytest.mark.sweep, id="some"),
            pytest.param(samples_of, marks=pytest.mark.slow, id="all"),
        ],
    )


def calls_of(op, sample) -> Iterator[tuple[str, Call]]:
    """The ways in which a program may call an operator with one sample."""
    process = sample.output_process_fn_grad or (lambda out: out)
    first, args, kwargs = sample.input, sample.args, sample.kwargs

    def function(x, *args, **kwargs):
        return process(op(x, *args, **kwargs))

    def function_of_conjugate(x, *args, **kwargs):
        return function(x.conj(), *args, **kwargs)

    def in_place(x, *args, **kwargs):
        before = x.exp()  # its backward needs the x that is overwritten
        return op.inplace_variant(x, *args, **kwargs), before

    def in_place_on_a_row(x, *args, **kwargs):
        rows = torch.stack([x, x])
        return op.inplace_variant(rows[0], *args, **kwargs), rows

    yield "function", Call(function, (first, *args), kwargs)
    if all(t.layout == torch.strided for t in tensors_of((first, args, kwargs))):
        gaps = sample.noncontiguous()
        yield "function of views", Call(function, (gaps.input, *gaps.args), gaps.kwargs)
    if isinstance(first, torch.Tensor) and first.is_complex():
        yield "function of a conjugate", Call(function_of_conjugate, (first, *args), kwargs)
    if isinstance(first, torch.Tensor) and op.inplace_variant is not None:
        yield "in place", Call(in_place, (first, *args), kwargs)
        yield "in place on a row", Call(in_place_on_a_row, (first, *args), kwargs)


@contextlib.contextmanager
def where_eager_reproduces(op) -> Iterator[None]:
    torch.use_deterministic_algorithms(op.name in NOT_REPRODUCED)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def sweep_operator(op, dtype, choose) -> Counter[str]:
    tally = Counter()
    with where_eager_reproduces(op):
        for index, sample in enumerate(choose(op, dtype)):
            for way, call in calls_of(op, sample):
                where = f"{name_of(op)}, {way}, {dtype}, sample {index}"
                usual = way in ("function", "in place") and differentiable(op, dtype)
                whole = usual and call.elements() < LARGE
                plan = every_way() if whole else one_policy_per_extent(index)
                refused = compare(where, call, plan, tally)
                if way == "function":
                    assert refused == (op.name in NOT_ON_THE_CPU), where

    assert tally, f"the database has no sample of {name_of(op)}"
    return tally


def nothing_recomputed(op, dtype, tally) -> bool:
    return differentiable(op, dtype) and tally["replayed under recompute_all"] == 0


@pytest.mark.swept
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("op", "dtype"), WITH_DTYPES)
def test_first_samples_of_every_operator(op, dtype):
    tally = sweep_operator(op, dtype, first_two)

    exempt = differentiable(op, dtype) and name_of(op) in NOTHING_TO_RECOMPUTE
    assert nothing_recomputed(op, dtype, tally) == exempt, tally


@pytest.mark.filterwarnings("ignore")
@some_or_all(MANY)
@pytest.mark.parametrize(("op", "dtype"), WITH_DTYPES)
def test_every_operator(op, dtype, choose):
    tally = sweep_operator(op, dtype, choose)

    assert not nothing_recomputed(op, dtype, tally) or name_of(op) in NOTHING_TO_RECOMPUTE, tally


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_what_eager_refuses_is_refused_with_the_same_error():
    tally = Counter()
    for op in ON_THE_CPU:
        set_rng_seed(0)
        wrong = op.error_inputs_func(op, "cpu") if op.error_inputs_func is not None else ()
        for index, sample in enumerate(error.sample_input for error in wrong):
            call = Call(op, (sample.input, *sample.args), sample.kwargs)
            compare(f"{name_of(op)}, wrong {index}", call, one_policy_per_extent(index), tally)

    assert tally["refused by eager"] > 300, tally


FILLS = (0x00, 0x55, 0x7F, 0xFE)


@pytest.mark.not_sanitized
@pytest.mark.filterwarnings("ignore")
@some_or_all(SOME)
@pytest.mark.parametrize("op", ON_THE_CPU, ids=name_of)
def test_results_do_not_depend_on_what_new_memory_holds(op, choose):
    """In every dtype. A replay of such an operator would give other bits than the forward."""
    if op.name in NOT_REPRODUCED:
        pytest.skip(NOT_REPRODUCED[op.name])
    for dtype in sorted(op.supported_dtypes("cpu"), key=str):
        for index, sample in enumerate(choose(op, dtype)):
            for way, call in calls_of(op, sample):
                first, *others = (seen_in_memory_filled_with(fill, call) for fill in FILLS)
                for fill, seen in zip(FILLS[1:], others, strict=True):
                    where = f"{name_of(op)}, {way}, {dtype}, sample {index}, fill {fill:#x}"
                    assert_same(seen, first, where)


def seen_in_memory_filled_with(fill: int, call: Call) -> compared.Seen:
    with new_memory_filled_with(fill):
        return call.run()


REPRODUCED_SINCE = {"linalg.lstsq": (2, 15)}  # releases of torch that mended an entry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.not_sanitized
@pytest.mark.parametrize("name", NOT_REPRODUCED)
def test_eager_does_not_reproduce_the_exceptions(name):
    op = next(op for op in op_db if op.name == name)
    samples = list(samples_of(op, torch.float64))

    def reproduced() -> bool:
        shown = [set() for _ in samples]
        for fill in range(100):
            for sample, outputs in zip(samples, shown, strict=True):
                call = Call(op, (sample.input, *sample.args), sample.kwargs)
                outputs.add(seen_in_memory_filled_with(fill, call)["output 0"])
                if len(outputs) > 1:
                    return False
        return True

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert reproduced() == (release >= REPRODUCED_SINCE.get(name, (99, 0)))


def test_the_sweep_notices_a_replay_that_gives_something_else(monkeypatch):
    calls = itertools.count(1)
    library = torch.library.Library("ebb_sweep_test", "DEF")
    library.define("count(Tensor x) -> Tensor")
    library.impl("count", lambda x: x.detach() * next(calls), "CPU")

    def count_from_one(x):
        nonlocal calls
        calls = itertools.count(1)
        return torch.ops.ebb_sweep_test.count(x)

    believed = ebb.Policy({"ebb_sweep_test::count": ebb.RECOMPUTE})
    monkeypatch.setattr(compared, "policy_named", lambda name, seed: believed)

    with pytest.raises(AssertionError, match=r"policy recompute_all.*gradient 0"):
        compare("count", Call(count_from_one, (torch.ones(3),), {}), every_way(), Counter())


def test_names_in_the_tables_are_in_the_database():
    names = {op.name for op in op_db}

    assert {*NOT_REPRODUCED, *NOT_ON_THE_CPU} <= names
