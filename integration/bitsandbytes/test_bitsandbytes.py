"""bitsandbytes: frozen int8 and 4-bit layers in checkpointed blocks, with trained adapters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ebb_tests.frameworks.own_checkpointing import Block, check_regions, plain, stack

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
import bitsandbytes as bnb


class Quantised(Block):
    """A frozen quantised layer with an adapter, as in QLoRA."""

    kind = "8bit"

    def __init__(self):
        super().__init__(64)
        weight = self.up.weight.detach()
        if self.kind == "8bit":
            self.up = bnb.nn.Linear8bitLt(64, 256, has_fp16_weights=False)
            self.up.weight = bnb.nn.Int8Params(weight, requires_grad=False)
        else:
            self.up = bnb.nn.Linear4bit(64, 256, compute_dtype=torch.float32)
            self.up.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        self.up.to("cpu").requires_grad_(False)
        self.adapter = nn.Linear(64, 256)

    def forward(self, x):
        x = self.norm(x)
        return x + self.dropout(self.down((self.up(x) + self.adapter(x)).relu()))


class Quantised4(Quantised):
    kind = "4bit"


@pytest.mark.parametrize("block", [Quantised, Quantised4])
def test_adapters(block):
    own = stack(partial(checkpoint, use_reentrant=False), block, 64)
    check_regions(stack(plain, block, 64), own, regions=4)
