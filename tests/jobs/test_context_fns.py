"""The context_fn of a checkpoint call: its answers become a policy, and it is asked once."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ebb
from ebb._region import context_fn
from ebb_tests.exactness import same_bits
from ebb_tests.stand_ins import fake_accelerator

mm, sin = torch.ops.aten.mm.default, torch.ops.aten.sin.default


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return ((x @ self.w).sin() @ self.w).sin()


def saved_by(context_fn, x=None):
    x = torch.randn(4, 4, requires_grad=True) if x is None else x
    block = Block()
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    ebb.reset_stats()
    y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    assert same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
    return ebb.stats()["total"]["bytes_saved"]


def list_form():
    return create_selective_checkpoint_contexts([mm])


def first_product(context, op, *args, **kwargs):
    first_product.calls.append(op)
    if op is mm and first_product.calls.count(mm) % 2:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


first_product.calls = []


def test_lists_and_functions_become_policies(taken):
    assert saved_by(list_form) == 2 * 64
    first_product.calls.clear()

    def context_fn():
        return create_selective_checkpoint_contexts(first_product)

    for _ in range(3):
        assert saved_by(context_fn) == 64
        # asked about each call once; afterwards what it said is known
        assert first_product.calls == [mm, sin, mm, sin]


@pytest.mark.parametrize(
    ("answer", "nbytes"),
    [
        (CheckpointPolicy.MUST_SAVE, 128),
        (CheckpointPolicy.PREFER_SAVE, 128),
        (CheckpointPolicy.MUST_RECOMPUTE, 0),
        (CheckpointPolicy.PREFER_RECOMPUTE, 0),
        (True, 128),
        (False, 0),
    ],
)
def test_answer_decides(taken, answer, nbytes):
    def context_fn():
        return create_selective_checkpoint_contexts(
            lambda ctx, op, *args, **kwargs: answer if op is mm else False
        )

    assert saved_by(context_fn) == saved_by(context_fn) == nbytes


def test_answer_offloads(taken):
    def context_fn():
        return create_selective_checkpoint_contexts(
            lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD
        )

    with fake_accelerator():
        for _ in range(2):
            saved_by(context_fn)
            assert ebb.stats()["total"]["bytes_offloaded"] > 0


def test_operator_outside_aten_runs_again_as_by_torch(taken):
    calls = []
    with torch.library._scoped_library("ebb_takeover", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: calls.append(x) or x * 2, "CPU")
        twice = torch.ops.ebb_takeover.twice.default
        answers = {
            CheckpointPolicy.PREFER_RECOMPUTE: 1,
            CheckpointPolicy.MUST_RECOMPUTE: 1,
            CheckpointPolicy.MUST_SAVE: 0,
        }
        for answer, replays in answers.items():

            def context_fn(answer=answer):
                return create_selective_checkpoint_contexts(
                    lambda ctx, op, *args, **kwargs: answer if op is twice else False
                )

            def block(x):
                return (twice(x.detach()) * x).sin()

            x = torch.randn(4, requires_grad=True)
            expected = torch.autograd.grad(block(x).sum(), x)[0]
            for _ in range(2):  # it is asked about in the first forward
                calls.clear()
                y = checkpoint(block, x, use_reentrant=False, context_fn=context_fn).sum()
                assert same_bits(torch.autograd.grad(y, x)[0], expected)
                assert len(calls) == 1 + replays


def test_function_sees_arguments(taken):
    shapes = []

    def by_shape(context, op, *args, **kwargs):
        assert not context.is_recompute
        if op is mm:
            shapes.append(args[1].shape)
        return CheckpointPolicy.MUST_SAVE if op is mm else CheckpointPolicy.PREFER_RECOMPUTE

    assert saved_by(lambda: create_selective_checkpoint_contexts(by_shape)) == 128
    assert shapes == [(4, 4), (4, 4)]


ASKED = []  # a global: functions that are made for each call may append to it


def function_of_a_call(saved):
    return lambda: create_selective_checkpoint_contexts(
        lambda context, op, *args, **kwargs: ASKED.append(op) or op in saved
    )


def is_in(saved, context, op, *args, **kwargs):
    ASKED.append(op)
    return op in saved


def partial_of_a_call(saved):
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(is_in, saved))


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call])
def test_context_fn_made_for_each_call_is_asked_once(taken, make):
    ASKED.clear()

    assert [saved_by(make([mm])) for _ in range(3)] == [128] * 3

    assert [mm, sin, mm, sin] == ASKED


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call])
def test_context_fn_with_other_arguments_has_another_policy(taken, make):
    assert [saved_by(make(ops)) for ops in ([mm], [], (mm,), {sin}, [mm])] == [128, 0, 128, 64, 128]


def list_of_operators(saved):
    return functools.partial(create_selective_checkpoint_contexts, saved)


@pytest.mark.parametrize("make", [function_of_a_call, partial_of_a_call, list_of_operators])
def test_list_that_changes_between_calls_counts_as_another_argument(taken, make):
    saved = [mm]
    context_fn = make(saved)
    assert saved_by(context_fn) == 128

    saved.clear()

    assert saved_by(context_fn) == 0


class Unreferable:
    """Allows no weak references, and is equal to everything."""

    __slots__ = ("saved",)
    __hash__ = None

    def __init__(self, saved):
        self.saved = saved

    def __eq__(self, other):
        return True

    def __contains__(self, op):
        return op in self.saved


def test_context_fn_that_cannot_be_told_from_others_is_asked_in_each_call(taken):
    saved = [saved_by(partial_of_a_call(Unreferable(ops))) for ops in ([mm], [], [mm])]

    assert saved == [128, 0, 128]
    assert context_fn._policies.cache_info().currsize == 0


def recursive():
    def context_fn():
        assert context_fn
        return create_selective_checkpoint_contexts([mm])

    return context_fn


def test_context_fn_that_refers_to_itself_is_called_each_time(taken):
    assert [saved_by(recursive()) for _ in range(2)] == [128, 128]


class Owner:
    def __init__(self, saved):
        self.saved = saved

    def context_fn(self):
        return create_selective_checkpoint_contexts(
            lambda context, op, *args, **kwargs: op in self.saved
        )


def test_method_has_a_policy_for_each_object(taken):
    first, second = Owner([mm]), Owner([])

    assert [saved_by(owner.context_fn) for owner in (first, second, first)] == [128, 0, 128]


def test_arguments_of_a_context_fn_are_freed(taken):
    owner = Owner([mm])
    saved_by(owner.context_fn)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_number_of_remembered_answers_is_limited(taken, monkeypatch):
    monkeypatch.setattr(
        context_fn, "_policies", functools.lru_cache(3)(context_fn._policies.__wrapped__)
    )
    for _ in range(5):
        saved_by(Owner([mm]).context_fn)
    saved_by(list_form)

    assert context_fn._policies.cache_info().currsize == 3
    assert [saved_by(list_form), saved_by(Owner([mm]).context_fn)] == [128, 128]


def test_context_fn_with_a_new_policy_in_each_call_is_told_of(taken, monkeypatch, capsys):
    monkeypatch.setattr(context_fn, "_MANY", 3)
    monkeypatch.setenv("_EBB_TOLD", "")

    for _ in range(5):
        saved_by(Owner([mm]).context_fn)

    told = capsys.readouterr().err
    assert told.count("ebb: the context_fn of Block gives a new policy in each call") == 1


@pytest.mark.parametrize(
    "answers",
    [[0, 1, 0, 1, 1], [1, 0, 0], [0, 0, 2, 1], [1, 1, 1, 0], [2, 2], [0, 0], [1, 2] * 10],
)
def test_policy_of_answers(answers):
    kinds = [None, ebb.SAVE, ebb.OFFLOAD]
    policy = context_fn.policy_of_answers({sin: [kinds[a] for a in answers]})
    with fake_accelerator():
        x = torch.randn(16, requires_grad=True)
        ebb.reset_stats()
        with ebb.region(policy):
            y = x
            for _ in answers:
                y = y.sin()
            y = y.cos()
        total = ebb.stats()["total"]
        assert total["bytes_saved"] == 64 * answers.count(1)
        torch.autograd.grad(y.sum(), x)


def test_too_many_different_answers_give_no_policy():
    assert context_fn.policy_of_answers({sin: [ebb.SAVE, None] * 100}) is None


def test_other_context_is_entered_in_forward_only(taken):
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            entered.append(f"{self.name} left")

    context_fn._warn_recompute_context.cache_clear()
    with pytest.warns(
        UserWarning, match="recomputation context that a context_fn returned is ignored"
    ):
        saved_by(lambda: (Context("forward"), Context("recompute")))
    assert entered == ["forward", "forward left"]


@pytest.mark.parametrize("is_freed", [False, True])
@pytest.mark.parametrize(("max_bytes", "nbytes"), [(64, 128), (63, 0)])
def test_context_fn_of_a_policy_has_all_its_rules(taken, is_freed, max_bytes, nbytes):
    policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, max_bytes=max_bytes)])
    context_fn = policy.to_sac()
    if is_freed:
        del policy
    assert saved_by(context_fn) == nbytes
