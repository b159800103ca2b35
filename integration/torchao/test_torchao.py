"""torchao: quantised training in checkpointed blocks."""

from __future__ import annotations

from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import check_regions, plain, stack

pytest.importorskip("torchao", reason="needs torchao")
quantization = pytest.importorskip("torchao.quantization")
qat = pytest.importorskip("torchao.quantization.qat")


def quantised(call):
    def make():
        import torch

        model, loss = stack(call)()
        weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
        config = qat.QATConfig(weight_config=weights, step="prepare")
        quantization.quantize_(model, config)
        return model, loss

    return make


@pytest.mark.parametrize("reentrant", [False, True])
def test_quantisation_aware_training(reentrant):
    own = quantised(partial(checkpoint, use_reentrant=reentrant))
    check_regions(quantised(plain), own, regions=4)
