"""Every module in torch's own database, in a region, bit for bit as in eager.

Each is called twice, as where two places of a model share it, so that the second call finds the
buffers that the first one wrote. The fast run takes the first input of each module, dtype and
mode; `make test-full` takes them all.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import set_rng_seed

from ebb_tests.operators.compared import Call, compare, every_way, one_policy_per_extent

DTYPES = (torch.float64, torch.float32, torch.complex128)
WITH_DTYPES = [
    pytest.param(info, dtype, id=f"{info.name}-{str(dtype).removeprefix('torch.')}")
    for info in module_db
    for dtype in DTYPES
    if dtype in info.supported_dtypes("cpu")
]
MODES = pytest.mark.parametrize(
    "training", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["training", "evaluation"]
)

# Modules of whose results nothing is recomputed, and why.
FILLED_BY_PARTS = "it fills empty memory part by part, and that stays kept"
NOTHING_TO_RECOMPUTE = {
    "nn.CircularPad1d": FILLED_BY_PARTS,
    "nn.CircularPad2d": FILLED_BY_PARTS,
    "nn.CircularPad3d": FILLED_BY_PARTS,
}

LARGE = 10_000  # elements: these get fewer runs


class Twice(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs), self.module(*args, **kwargs)


def sweep(info, dtype, training, count=None) -> None:
    set_rng_seed(0)
    tally = Counter()
    inputs = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
    for index, given in enumerate(itertools.islice(inputs, count)):
        made = given.constructor_input
        module = Twice(info.module_cls(*made.args, **made.kwargs).to(dtype)).train(training)
        call = Call(module, given.forward_input.args, given.forward_input.kwargs)
        plan = every_way() if call.elements() < LARGE else one_policy_per_extent(index)
        mode = "training" if training else "evaluation"
        compare(f"{info.name} in {mode}, {dtype}, input {index}", call, plan, tally)

    assert tally["refused by eager"] == 0, tally
    recomputed = tally["replayed under recompute_all"] > 0
    assert recomputed == (info.name not in NOTHING_TO_RECOMPUTE), tally


@MODES
@pytest.mark.swept
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("info", "dtype"), WITH_DTYPES)
def test_first_input_of_every_module(info, dtype, training):
    sweep(info, dtype, training, count=1)


@MODES
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("info", "dtype"), WITH_DTYPES)
def test_every_input_of_every_module(info, dtype, training):
    sweep(info, dtype, training)
