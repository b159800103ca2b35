"""Programs with regions inside compiled functions, and forms in which a program enters a region."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import same_bits


class Program(nn.Module):
    """Two functions, `first` and `second`, that `forward` calls in regions; `outside` runs between.

    Each subclass overrides the functions that it tests.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.ones(8))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x + self.mean).sin()).exp()

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    def after(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(self.before(x)).sin())
        self.after()
        return y


class WritesInside(Program):
    def first(self, x):
        y = super().first(x)
        self.mean.mul_(0.9)
        return y


class WritesBefore(Program):
    def before(self, x):
        self.mean.mul_(0.9)
        return x


class WritesWhatWasRead(Program):
    def before(self, x):
        y = x + self.mean * 1.5
        self.mean.mul_(0.9)
        return y


class WritesAfter(Program):
    def after(self):
        self.mean.mul_(0.9)


class WritesAfterAView(WritesAfter):
    def first(self, x):
        return self.linear((x + self.mean.view(2, 4).view(8)).sin()).exp()


class WritesAParameter(Program):
    def first(self, x):
        return self.linear((x + self.other.bias).sin()).exp()

    def after(self):
        self.other.bias.data.add_(1)


class WritesBetweenReads(Program):
    def first(self, x):
        y = x + self.mean
        self.mean.add_(1)
        return self.linear(y.sin()).exp()


class WritesAResult(Program):
    def first(self, x):
        y = (x + self.mean).sin()
        self.mean.add_(y.detach().mean(0))
        return self.linear(y.exp()).exp()


class Copies(Program):
    def first(self, x):
        self.mean.copy_(self.linear(x).detach().mean(0))
        return self.linear(x * self.mean).exp()


class BatchNorm(Program):
    def first(self, x):
        return self.norm(self.linear(x.sin())).exp()


class Attention(Program):
    def first(self, x):
        q, v = x.view(1, 4, 2, 4), self.linear(x).view(1, 4, 2, 4)
        return F.scaled_dot_product_attention(q, q.sin(), v).reshape(4, 8).exp()


class SeveralResults(Program):
    def first(self, x):
        largest, places = self.linear(x).topk(4)
        a, b = self.linear(x).sin().chunk(2, 1)
        y = torch.zeros_like(x).scatter(1, places, largest.exp())
        return y.sin() + torch.cat([a * b.exp(), a], 1)


class WritesWhatSeveralResultsShow(Program):
    def first(self, x):
        largest, _ = self.mean.view(2, 4).max(0)
        sorted_, _ = (self.mean * torch.arange(8.0)).sort()
        a, b = self.mean.split(4)
        y = x * sorted_.sin() + largest.exp().repeat(2)
        return self.linear((y + torch.cat([b.cos(), a.sin()])).sin()).exp()

    def after(self):
        self.mean.mul_(0.9)


class WritesInPlace(Program):
    def first(self, x):
        return self.linear(x).sin().mul_(2).add_(x).exp()


class Dropout(Program):
    def first(self, x):
        return F.dropout(self.linear(x).exp(), 0.3)


class RandomNumbers(Program):
    def first(self, x):
        y = self.linear(x * torch.bernoulli(torch.full_like(x, 0.5))).exp()
        y = y * torch.randn_like(y) + F.rrelu(self.linear(y), training=True).sin()
        return y[torch.multinomial(torch.ones(4), 4)].exp()


class Norms(Program):
    def first(self, x):
        return F.layer_norm(self.linear(x), (8,)).sin()


class Detaches(Program):
    def first(self, x):
        y = self.linear(x).sin()
        with torch.no_grad():
            z = y.sin() * 2
        return (y * y.detach().exp() * z).exp()


class Autocast(Program):
    def first(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).sin().float().exp()


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class Contexts(Program):
    def first(self, x):
        return KeepsOnContext.apply(x.sin(), self.linear.weight).exp()


class DrawsForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.rand_like(x))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class WritesStatisticsThatAreRead(Program):
    def first(self, x):
        y = self.norm(self.linear(x.sin()))
        return (y * self.norm.running_mean.exp()).exp()


class WritesACopiedBuffer(Program):
    """Inductor removes the copies of the buffer, and their tags."""

    def first(self, x):
        copied = F.dropout(torch.cat([self.mean.clone()]).repeat(1), 0.0).double().float()
        return self.linear(x + copied).exp()

    def after(self):
        self.mean.mul_(0.5)


class WritesItsInput(Program):
    def first(self, x):
        y = x * 1.0
        self.other.weight.data.lerp_(self.linear.weight.data, 0.1)
        return self.other(self.linear(y.mul_(2).sin())).exp()


class Wide(Program):
    """Each region has two matrix products, with a result of 256 columns between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 256), nn.Linear(256, 8)

    def first(self, x):
        return x + self.down(self.up(x).sin().exp())

    def second(self, x):
        return x + self.down(self.up(x).cos().exp())


PROGRAMS = [*Program.__subclasses__(), WritesAfterAView, Program]


def by_apply(program, policy):
    ebb.apply(program, policy, "")


def by_decorator(program, policy):
    first, second = program.first, program.second
    program.first = ebb.region(policy, "first")(first)
    program.second = lambda x: ebb.region(policy)(second)(x)


def by_with(program, policy):
    first, second = program.first, program.second

    def in_region(x):
        with ebb.region(policy):
            return first(x)

    def returns(x):
        with ebb.region(policy, "second") as region:
            y = second(x)
            region.returns(y)
        return y

    program.first, program.second = in_region, returns


def by_checkpoint(program, policy):
    first, second = program.first, program.second
    program.first = lambda x: ebb.checkpoint(first, x, policy=policy, use_reentrant=False)
    program.second = lambda x: ebb.checkpoint(second, x, policy=policy)


def nested(program, policy):
    first = program.first

    def inside(x):
        with ebb.region(ebb.policies.save_all):
            x = x * 1.0
            with ebb.region(policy):
                x = first(x)
            return x * 1.0

    program.first = inside


def beside_torchs(program, policy):
    second = program.second
    by_with(program, policy)
    program.second = lambda x: torch.utils.checkpoint.checkpoint(second, x, use_reentrant=False)


FORMS = (by_apply, by_decorator, by_with, by_checkpoint, nested, beside_torchs)
POLICIES = ("recompute_all", "save_matmuls")


def steps(program, call):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        y = call(x)
        y.sum().backward()
        found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in program.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in program.buffers()]
        program.zero_grad()
    return found


def check(kind, form, policy, **options):
    eager, program = kind(), kind()
    expected = steps(eager, eager)
    form(program, getattr(ebb.policies, policy))
    found = steps(program, torch.compile(program, **({"backend": "aot_eager"} | options)))
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))
