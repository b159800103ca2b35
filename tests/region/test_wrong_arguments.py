"""Arguments of the wrong type or value: the error says what was expected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb import _C, SAVE, Policy, Rule
from ebb_tests.stand_ins import failing_policy


def generator():
    yield 1


async def coroutine():
    pass


async def asynchronous_generator():
    yield 1


class YieldsWhenCalled:
    def __call__(self):
        yield 1


ONES = torch.ones(3)
A_POLICY = r"policy must be an ebb.Policy"
CALLS = [
    (lambda: ebb.region("save_all"), TypeError, A_POLICY),
    (lambda: ebb.region(1), TypeError, A_POLICY),
    (lambda: ebb.region({"aten::mm": SAVE}), TypeError, A_POLICY),
    (lambda: ebb.region(SAVE), TypeError, A_POLICY),
    (lambda: ebb.region(name=3), TypeError, "name must be a str"),
    (lambda: ebb.region(root=3), TypeError, r"root must be a torch.nn.Module"),
    (lambda: ebb.region(escapes="drop"), ValueError, "escapes must be 'keep' or 'placeholder'"),
    (lambda: ebb.region(escapes="placeholder").returns(ONES), RuntimeError, "is not entered"),
    (lambda: ebb.region()(3), TypeError, "can decorate only a callable"),
    (lambda: ebb.region()(generator), TypeError, "enter the region inside it"),
    (lambda: ebb.region()(coroutine), TypeError, "enter the region inside it"),
    (lambda: ebb.region()(asynchronous_generator), TypeError, "enter the region inside it"),
    (lambda: ebb.region()(YieldsWhenCalled()), TypeError, "enter the region inside it"),
    (lambda: ebb.apply(nn.Linear(2, 2), escapes="drop"), ValueError, "escapes must be"),
    (lambda: ebb.apply(nn.Linear(2, 2), modules=3), TypeError, "or a function"),
    (lambda: ebb.apply(lambda x: x), TypeError, r"must be a torch.nn.Module"),
    (lambda: ebb.checkpoint(3), TypeError, "function must be callable"),
    (lambda: ebb.checkpoint(torch.sin, policy="save_all"), TypeError, r"must be an ebb.Policy"),
    (lambda: ebb.checkpoint_name(3, "a"), TypeError, "x must be a tensor"),
    (lambda: ebb.checkpoint_name(ONES, 3), TypeError, "must be a str"),
    (lambda: ebb.experimental.discardable(ONES), ValueError, "only inside the region"),
    (lambda: ebb.experimental.discardable(3), TypeError, "discardable needs a tensor; got int"),
    (lambda: ebb.opaque([ONES]), TypeError, "opaque takes tensors; got list"),
    (lambda: ebb.verify("loud"), ValueError, "mode must be 'raise', 'demote' or 'off'; got 'loud'"),
    (lambda: ebb.record_reports(-1), ValueError, "steps"),
    (lambda: ebb.record_reports("1"), TypeError, "steps"),
    (lambda: ebb.record_reports(True), TypeError, "steps"),
    (lambda: Policy(["aten::mm"]), TypeError, r"sequence of ebb.Rule"),
    (lambda: Policy.parse(3), TypeError, "must be a str"),
    (lambda: Rule("aten::mm", SAVE, every=0), ValueError, "every must be from 1"),
    (lambda: Rule("aten::mm", SAVE, every=1.5), TypeError, "every must be an int"),
    (lambda: Rule("aten::mm", SAVE, force=1), TypeError, "force must be a bool"),
    (lambda: failing_policy(0), ValueError, "at must be 1 or more; got 0"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()

    assert not _C.in_region()
