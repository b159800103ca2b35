"""Tensor and pipeline parallelism by hand, as Megatron-LM has it. ebb_tests.ranks.strategies and
model_strategies have torch's own, and layers that are split by hand.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ebb_tests.ranks.collectives import peer, rank
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.megatron import AsyncLinear, Stack, copy_to, halves, reduce_from
from ebb_tests.ranks.model_strategies import stages
from ebb_tests.ranks.models import WIDTH, batch, plain, train_steps
from ebb_tests.ranks.two_ranks import on_two_ranks

# Tensor parallelism


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
        start = rank() * size
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


def trained(inside, model, loss_of):
    """`loss_of(step)`: the loss, which one region computes."""

    def step_of(_model, step):
        with inside.region():
            loss = loss_of(step)
        loss.backward()
        return loss

    return train_steps(model, step_of=step_of)


@on_two_ranks
def test_cross_entropy_over_a_split_vocabulary():
    def train(inside):
        head = nn.Linear(WIDTH, 6)

        def loss_of(step):
            h = copy_to(batch(step, same=True).sin())
            return ParallelEntropy.apply(head(h).tanh() * 3, torch.arange(4)).mean()

        return trained(inside, head, loss_of)

    assert_exact(train)


class SplitEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(halves(torch.randn(12, WIDTH), 0))

    def forward(self, tokens):
        start = rank() * 6
        missing = (tokens < start) | (tokens >= start + 6)
        local = tokens.clone() - start
        local[missing] = 0
        rows = self.weight[local]
        rows[missing, :] = 0.0
        return reduce_from(rows)


@on_two_ranks
def test_embedding_over_a_split_vocabulary():
    def train(inside):
        model = SplitEmbedding()

        def loss_of(_step):
            h = model(torch.tensor([1, 7, 11, 0, 7]))
            return (h.sin() * h.exp()).sin().mean()

        return trained(inside, model, loss_of)

    assert_exact(train)


# Pipelines

MICROBATCHES = 4


def transfer(operation, tensor, how):
    """`operation`: "send" or "recv"."""
    begin = getattr(dist, f"i{operation}")
    match how:
        case "sync":
            getattr(dist, operation)(tensor, peer())
        case "async":
            begin(tensor, peer()).wait()
        case "batch":
            for work in dist.batch_isend_irecv([dist.P2POp(begin, tensor, peer())]):
                work.wait()
    return tensor


@pytest.mark.parametrize("kept", ["not at all", "new buffers", "one buffer"])
@pytest.mark.parametrize("how", ["sync", "async", "batch"])
@on_two_ranks
def test_stages_that_send_and_receive(how, kept):
    """All forwards, then all backwards. With one buffer for all, each region copies it first."""

    def forwards(module, step, inside):
        outputs, inputs = [], []
        buffer = torch.empty(4, WIDTH)
        for i in range(MICROBATCHES):
            if rank() == 0:
                with inside.region():
                    y = module(batch(10 * step + i, same=True))
                    # Inside, where its bytes may be recomputed later.
                    transfer("send", y.detach(), how)
                outputs.append(y)
                continue
            if kept != "one buffer":
                buffer = torch.empty(4, WIDTH)
            x = transfer("recv", buffer, how).requires_grad_() if kept == "new buffers" else None
            with inside.region():
                if x is None:
                    x = transfer("recv", buffer, how).clone().requires_grad_()
                outputs.append(module(x).square().mean())
            inputs.append(x)
        return outputs, inputs

    def train(inside):
        def step_of(module, step):
            outputs, inputs = forwards(module, step, inside)
            for i in range(MICROBATCHES):
                if rank() == 0:
                    outputs[i].backward(transfer("recv", torch.empty(4, WIDTH), how))
                else:
                    outputs[i].backward()
                    transfer("send", inputs[i].grad, how)
            return torch.stack([plain(y.mean()) for y in outputs])

        return train_steps(stages(2)[rank()], step_of=step_of)

    assert_exact(train)


class SendForward(torch.autograd.Function):
    """Sends in forward, receives its gradient in backward."""

    @staticmethod
    def forward(ctx, x):
        dist.send(x, peer())
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return transfer("recv", torch.empty(ctx.shape, dtype=ctx.dtype), "sync")


class ReceiveForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, shape):
        return transfer("recv", torch.empty(shape), "sync")

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), peer())
        return None, None


@on_two_ranks
def test_stages_that_autograd_connects():
    def train(inside):
        module = stages(2)[rank()]

        def loss_of(step):
            if rank() == 0:
                return SendForward.apply(module(batch(step, same=True)).sin())
            x = ReceiveForward.apply(torch.zeros((), requires_grad=True), (4, WIDTH))
            return module(x.sin()).square().mean()

        return trained(inside, module, loss_of)

    assert_exact(train)
