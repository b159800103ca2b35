"""Pipeline stages that send and receive by hand. strategies.py has torch's schedules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ebb_tests.ranks.collectives import peer, rank
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.models import WIDTH, Block, batch, plain, train_steps
from ebb_tests.ranks.two_ranks import on_two_ranks

MICROBATCHES = 4


def stage_modules(count):
    """The same on both ranks; each keeps its own."""
    torch.manual_seed(11)
    return [nn.Sequential(Block(), Block()) for _ in range(count)]


def send(tensor, how):
    match how:
        case "send":
            dist.send(tensor, peer())
        case "isend":
            dist.isend(tensor, peer()).wait()
        case _:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer())]):
                work.wait()


def receive(buffer, how):
    match how:
        case "send":
            dist.recv(buffer, peer())
        case "isend":
            dist.irecv(buffer, peer()).wait()
        case _:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, peer())]):
                work.wait()
    return buffer


@pytest.mark.parametrize("kept", ["by nobody", "new buffers", "one buffer"])
@pytest.mark.parametrize("how", ["send", "isend", "batch"])
@on_two_ranks
def test_stages_by_hand(how, kept):
    """All forwards, then all backwards. With one buffer for all, each region copies it first."""

    def forwards(module, step, inside):
        outputs, inputs = [], []
        buffer = torch.empty(4, WIDTH)
        for i in range(MICROBATCHES):
            if rank() == 0:
                with inside.region():
                    y = module(batch(10 * step + i, same=True))
                    send(y.detach(), how)  # inside, where its bytes may be recomputed later
                outputs.append(y)
                continue
            if kept != "one buffer":
                buffer = torch.empty(4, WIDTH)
            x = receive(buffer, how).requires_grad_() if kept == "new buffers" else None
            with inside.region():
                if x is None:
                    x = receive(buffer, how).clone().requires_grad_()
                outputs.append(module(x).square().mean())
            inputs.append(x)
        return outputs, inputs

    def train(inside):
        module = stage_modules(2)[rank()]

        def step_of(module, step):
            outputs, inputs = forwards(module, step, inside)
            for i in range(MICROBATCHES):
                if rank() == 0:
                    gradient = receive(torch.empty(4, WIDTH), how)
                    outputs[i].backward(gradient)
                else:
                    outputs[i].backward()
                    send(inputs[i].grad, how)
            return torch.stack([plain(y.mean()) for y in outputs])

        return train_steps(module, step_of=step_of)

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
        received = torch.empty(ctx.shape, dtype=ctx.dtype)
        dist.recv(received, peer())
        return received


class ReceiveForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, shape):
        received = torch.empty(shape)
        dist.recv(received, peer())
        return received

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), peer())
        return None, None


@on_two_ranks
def test_stages_that_autograd_connects():
    def train(inside):
        module = stage_modules(2)[rank()]

        def step_of(module, step):
            with inside.region():
                if rank() == 0:
                    loss = SendForward.apply(module(batch(step, same=True)).sin())
                else:
                    x = ReceiveForward.apply(torch.zeros((), requires_grad=True), (4, WIDTH))
                    loss = module(x.sin()).square().mean()
            loss.backward()
            return loss

        return train_steps(module, step_of=step_of)

    assert_exact(train)
