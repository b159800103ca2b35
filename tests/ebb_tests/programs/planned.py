"""Small programs to plan: each a model whose blocks become regions, and a step of it.

Together they have all that is hard to plan: results that several regions read, in-place writes,
random operators, buffers, views, tensors that the program itself holds, and blocks that run twice.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._plan.choose.chooser import Chooser, Chosen
from ebb._plan.choose.region_pareto import Point
from ebb._plan.profile.measuring import Measured, base_bytes
from ebb._plan.profile.profile import Operator
from ebb._plan.simulate.choice import EAGER, Choice, policy_of
from ebb._plan.simulate.simulator import Simulator

# Kernels of such CPUs need scratch memory at other places. Measured on one machine of each kind.
HAS_AVX2_ONLY = torch.backends.cpu.get_cpu_capability() == "AVX2"

WIDTH = 32
LENGTH = 16

Step = Callable[[], object]


@dataclass
class Program:
    """A program for which tests make plans.

    Attributes:
        model: contains the blocks.
        step: runs a forward and a backward.
        blocks: globs of modules that become regions.
    """

    model: nn.Module
    step: Step
    blocks: tuple[str, ...]

    def run(self) -> list[torch.Tensor | None]:
        """Clears the gradients and runs a step. Returns the gradients and buffers."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        self.step()
        of_model = [*self.model.parameters(), *self.model.buffers()]
        return [(one.grad if one.requires_grad else one.detach()) for one in of_model]


def repeatable(program: Program) -> Callable[[], list[torch.Tensor | None]]:
    """Returns a function that restores the buffers, runs a step, and copies its results."""
    buffers = {name: one.clone() for name, one in program.model.named_buffers()}

    def run() -> list[torch.Tensor | None]:
        for name, one in program.model.named_buffers():
            one.copy_(buffers[name])
        return [None if one is None else one.clone() for one in program.run()]

    return run


class Attention(nn.Module):
    def __init__(self, heads: int = 4, rotary: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=not rotary)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not rotary)
        self.heads, self.rotary = heads, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        q, k, v = parts
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.shape[2]).float(), torch.arange(x.shape[3] // 2).float())
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class PreLN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention = Attention(rotary=True)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    """A block of a ResNet, with relu in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x
        return F.relu(y, inplace=True)


class Shortcut(nn.Module):
    """Adds a shortcut in place. Returns the result of a relu_, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        h += x.cos()
        return F.relu(h, inplace=True)


class Chain(nn.Module):
    """Writes in place several times, to tensors that autograd saved and to others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).add_(1).mul_(0.5).relu_()
        z = self.outer(y).sigmoid_()
        z = z * y
        z[:, 0].zero_()
        return z.add_(x).tanh_()


class TwoReads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.silu(self.inner(torch.cat([x, other], -1)))
        return self.outer(y).exp().tanh(), y


class Branching(nn.Module):
    """All later blocks read a result of the first block."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoReads() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, y = self.layers[0](x, x)
        out = first
        for layer in self.layers[1:]:
            out, y = layer(out, first.sigmoid() * y)
        return out * y


def double(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.SiLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([double(3, 4), double(4, 8), double(8, 16)])
        self.up = nn.ModuleList([double(16 + 8, 8), double(8 + 4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x


class Stack(nn.Module):
    """Layers between an embedding and a head, which are outside of regions."""

    def __init__(self, *layers: nn.Module, words: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def of_ids(model: nn.Module, batches: int = 1) -> Step:
    data = [torch.randint(0, 50, (4, LENGTH + 1)) for _ in range(batches)]

    def step() -> None:
        for ids in data:
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()

    return step


def of_rows(model: nn.Module, *shape: int, seed: bool = False) -> Step:
    """A step on one input; `shape`: of the input."""
    x = torch.randn(shape or (4, LENGTH, WIDTH))

    def step() -> None:
        if seed:
            torch.manual_seed(5)
        model(x).square().mean().backward()

    return step


def of_pictures(model: nn.Module, channels: int) -> Step:
    return of_rows(model, 2, channels, 16, 16)


def in_a_row(blocks: Iterable[nn.Module], *shape: int, seed: bool = False) -> Program:
    model = nn.Sequential(*blocks)
    return Program(model, of_rows(model, *shape, seed=seed), ("[0-9]",))


def pre_ln() -> Program:
    model = Stack(*(PreLN() for _ in range(4)))
    return Program(model, of_ids(model), ("layers.*",))


def llama() -> Program:
    model = Stack(*(Llama() for _ in range(3)))
    return Program(model, of_ids(model), ("layers.*",))


def residual() -> Program:
    return in_a_row((Residual() for _ in range(3)), 2, 8, 16, 16)


def shortcuts() -> Program:
    return in_a_row(Shortcut() for _ in range(8))


def unet() -> Program:
    model = UNet()
    return Program(model, of_pictures(model, 3), ("down.*", "up.*"))


def dropout_encoder() -> Program:
    layers = (
        nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        for _ in range(3)
    )
    return in_a_row(layers, seed=True)


def shared() -> Program:
    """Two blocks, each of which runs twice."""
    one, other = PreLN(), Chain()
    return in_a_row([one, other, one, other])


def branching() -> Program:
    model = Branching()
    return Program(model, of_rows(model), ("layers.*",))


def chain() -> Program:
    return in_a_row(Chain() for _ in range(4))


def accumulation() -> Program:
    """Two micro-batches in one step."""
    model = Stack(*(PreLN() for _ in range(2)))
    return Program(model, of_ids(model, batches=2), ("layers.*",))


def holding() -> Program:
    """The program holds what each layer returns until the end of the step."""
    model = nn.ModuleList(PreLN() for _ in range(3))
    x = torch.randn(4, LENGTH, WIDTH)

    def step() -> None:
        hidden = [x]
        for layer in model:
            hidden.append(layer(hidden[-1]))
        loss = sum(one.square().mean() for one in hidden[1:])
        loss.backward()  # type: ignore[union-attr]

    return Program(model, step, ("[0-9]",))


def checkpointed() -> Program:
    """torch.utils.checkpoint runs the layer between the two regions."""
    model = nn.Sequential(PreLN(), PreLN(), PreLN())
    x = torch.randn(4, LENGTH, WIDTH)

    def step() -> None:
        y = model[0](x)
        y = checkpoint(model[1], y, use_reentrant=False)
        model[2](y).square().mean().backward()

    return Program(model, step, ("0", "2"))


def recurrent() -> Program:
    """Cells in a Python loop: one region calls the same operators dozens of times."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.take = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, found = torch.zeros_like(x[:, 0]), []
            for row in self.take(x).unbind(1):
                state = torch.tanh(self.mix(state) + row) * torch.sigmoid(row)
                found.append(state)
            return torch.stack(found, 1)

    return in_a_row([Cell(), Cell()])


def mixed_precision() -> Program:
    """Autocast: weights are cast in the first region that uses them, and cached."""
    model = nn.Sequential(PreLN(), PreLN())
    x = torch.randn(4, LENGTH, WIDTH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()

    return Program(model, step, ("[0-9]",))


def frozen() -> Program:
    """The embedding and the first layer are frozen, and half of another layer."""
    model = Stack(*(PreLN() for _ in range(4)))
    for part in (model.embedding, model.layers[0], model.layers[2].mlp):
        part.requires_grad_(False)
    return Program(model, of_ids(model), ("layers.*",))


PROGRAMS = (
    pre_ln, llama, residual, shortcuts, unet, dropout_encoder, shared, branching, chain,
    accumulation, holding, checkpointed, recurrent, mixed_precision, frozen,
)  # fmt: skip


def built(make: Callable[[], Program]) -> Program:
    """Makes a program and runs a step. So later steps accumulate into existing gradients."""
    torch.manual_seed(1)
    program = make()
    program.step()
    return program


def profiled(program: Program, policy: ebb.Policy) -> ebb.Profile:
    with ebb.apply(program.model, policy, program.blocks):
        return ebb.profile(program.step, steps=1)


def with_steady_times(profile: ebb.Profile) -> ebb.Profile:
    """Replaces measured times by times computed from bytes, which are the same in each run.

    Matrix products take six times as long per byte."""
    hard = re.compile("mm|convolution|attention")

    def runtime(one: Operator) -> float:
        moved = sum(profile.values[value].memory for value in (*one.inputs, *one.outputs))
        return 0.002 + 1e-6 * moved * (6 if hard.search(one.func_name) else 1)

    operators = (replace(one, runtime=runtime(one)) for one in profile.operators)
    return replace(profile, operators=tuple(operators))


def measured(program: Program) -> Measured:
    """Measures as `ebb.plan` does, but with computed times."""
    base = base_bytes([program.model])
    found = with_steady_times(profiled(program, ebb.policies.recompute_all))
    return Measured(found, 131.0, base)


@dataclass
class Planning:
    """A program, with the measurements and the chooser for its plans."""

    program: Program
    measured: Measured
    chooser: Chooser
    plain_peak: int = 0  # the measured peak of an eager step

    @property
    def simulator(self) -> Simulator:
        return self.chooser.simulator

    def chosen(self, choices: Mapping[str, Choice | None]) -> dict[str, Point]:
        """The choices in the form that a chooser returns."""
        return {region: Point(choice, 0, 0.0) for region, choice in choices.items()}

    def policies(self, chosen: Chosen) -> ModulePolicies:
        """The policies for these choices."""
        found = {}
        for region, point in chosen.items():
            if point.choice is not EAGER:
                names = self.simulator.step.names_of(self.chooser.calls[region][0])
                found[region] = policy_of(point.choice, names)
        return ModulePolicies(found)

    def peak(self, chosen: Chosen) -> int:
        """The measured peak of a step with these choices."""
        with self.policies(chosen).apply(self.program.model):
            return ebb.profile(self.program.step, steps=1).peak

    def random_sets(self, seed: int) -> dict[str, Choice | None]:
        """Random choices for each region: saved operators, or EAGER."""
        rng = random.Random(seed)
        found: dict[str, Choice | None] = {}
        for region, calls in self.chooser.calls.items():
            share = rng.choice([0.2, 0.5, 0.8])
            places = range(len(self.simulator.step.calls[calls[0]].operators))
            found[region] = Choice(frozenset(place for place in places if rng.random() < share))
            if rng.random() < 0.15:
                found[region] = EAGER
        return found


@functools.cache
def planning(make: Callable[[], Program]) -> Planning:
    """The planning for a program. Cached: tests change nothing in it except gradients."""
    program = built(make)
    found = measured(program)
    plain = ebb.profile(program.step, steps=1)
    return Planning(program, found, Chooser(Simulator(found)), plain.peak)


def planned(make, budget, **arguments):
    """A program, and a plan for it."""
    program = built(make)
    return program, ebb.plan(
        program.model, program.step, budget, modules=program.blocks, **arguments
    )
