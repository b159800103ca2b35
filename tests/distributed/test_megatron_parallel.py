"""Tensor and sequence parallelism by hand, as Megatron-LM has it: collectives that write in place
inside of custom functions.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.megatron import AsyncLinear, Stack, copy_to, halves, reduce_from
from ebb_tests.ranks.models import WIDTH, batch, train_steps
from ebb_tests.ranks.two_ranks import on_two_ranks


@pytest.mark.parametrize("policy", ["save_matmuls", "recompute_all"])
@on_two_ranks
def test_one_global_buffer_for_all_layers(policy):
    """A buffer of this size is copied when a region has written it and reads it again."""

    def train(inside):
        AsyncLinear.buffer = None
        model = Stack("sequence, async")
        inside.apply(model, "layers.*")
        return train_steps(model)

    assert_exact(train, [policy])


class ParallelEntropy(torch.autograd.Function):
    """Megatron-LM's cross entropy over a vocabulary that is split: three sums, and writes in place
    to what was reduced.
    """

    @staticmethod
    def forward(ctx, logits, target):
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        size = logits.shape[-1]
        start = dist.get_rank() * size
        missing = (target < start) | (target >= start + size)
        local = (target - start).clone()
        local[missing] = 0
        rows = torch.arange(len(local))
        predicted = logits[rows, local].clone()
        predicted[missing] = 0.0
        dist.all_reduce(predicted)
        exponentials = logits
        torch.exp(logits, out=exponentials)
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        loss = torch.log(total) - predicted
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, missing, local)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        softmax, missing, local = ctx.saved_tensors
        result = softmax.clone()
        result[torch.arange(len(local)), local] -= 1.0 - missing.to(result.dtype)
        return result * gradient.unsqueeze(-1), None


@on_two_ranks
def test_cross_entropy_over_a_split_vocabulary():
    def train(inside):
        head = nn.Linear(WIDTH, 6)

        def step_of(head, step):
            with inside.region():
                h = copy_to(batch(step, same=True).sin())
                loss = ParallelEntropy.apply(head(h).tanh() * 3, torch.arange(4)).mean()
            loss.backward()
            return loss

        return train_steps(head, step_of=step_of)

    assert_exact(train)


class SplitEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(halves(torch.randn(12, WIDTH), 0))

    def forward(self, tokens):
        start = dist.get_rank() * 6
        missing = (tokens < start) | (tokens >= start + 6)
        local = tokens.clone() - start
        local[missing] = 0
        rows = self.weight[local]
        rows[missing, :] = 0.0
        return reduce_from(rows)


@on_two_ranks
def test_an_embedding_over_a_split_vocabulary():
    def train(inside):
        def step_of(model, step):
            with inside.region():
                h = model(torch.tensor([1, 7, 11, 0, 7]))
                loss = (h.sin() * h.exp()).sin().mean()
            loss.backward()
            return loss

        return train_steps(SplitEmbedding(), step_of=step_of)

    assert_exact(train)
