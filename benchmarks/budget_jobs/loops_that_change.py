"""Training loops whose steps differ: other batches, other shapes, other parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budget_jobs.job import CHANGE, ROWS, WIDTH, Block, Job, Net, kind


@kind("frozen, then not")
class Thawed(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step in (0, CHANGE):
            self.model.layers[:4].requires_grad_(step > 0)
        super().step(step)


@kind("all frozen, then not")
class AllThawed(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step in (0, CHANGE):
            self.model.layers.requires_grad_(step > 0)
        super().step(step)


@kind("unfrozen gradually")
class Gradually(Job):
    steps = 44

    def step(self, step: int) -> None:
        if step == 0:
            self.model.layers[:5].requires_grad_(False)
        if step % 7 == 6 and step < 35:
            self.model.layers[4 - step // 7].requires_grad_(True)
        super().step(step)


@kind("growing batch")
class Growing(Job):
    steps = 40

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else ROWS + ROWS // 2


@kind("batch that grows each step")
class GrowingAlways(Job):
    steps = 48

    def rows(self, step: int) -> int:
        return ROWS // 2 + 16 * step


@kind("shrinking batch")
class Shrinking(Job):
    steps = 60

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else ROWS // 3


@kind("batch by keyword")
class ByKeyword(Growing):
    def build(self) -> nn.Module:
        return Net(call=lambda layer, x: layer(x=x))


class Nested(Block):
    def forward(self, inputs: Any) -> Any:
        return {"pair": (super().forward(inputs["pair"][0]), inputs["pair"][1])}


class NetOfNested(Net):
    def __init__(self) -> None:
        super().__init__(block=Nested)

    def forward(self, x: Any) -> Tensor:
        x = {"pair": (x, None)}
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x["pair"][0])
        return y


@kind("tuples and dicts")
class InTuples(Growing):
    def build(self) -> nn.Module:
        return NetOfNested()


class Crossing(Block):
    """A block that attends to a second argument."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + torch.softmax(x @ memory.T, -1) @ memory)


class WithMemory(Net):
    def __init__(self) -> None:
        super().__init__(block=Crossing)

    def forward(self, x: Any) -> Tensor:
        x, memory = x[:ROWS], x[ROWS // 2 :]
        for layer in self.layers:
            x = layer(x, memory)
        y: Tensor = self.head(x)
        return y


@kind("second argument that grows")
class GrowingMemory(Job):
    steps = 40

    def build(self) -> nn.Module:
        return WithMemory()

    def rows(self, step: int) -> int:
        return ROWS if step < CHANGE else 2 * ROWS


class Attending(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.softmax(x @ x.transpose(-1, -2), -1) @ x)


@kind("other shapes of equal size")
class Reshaped(Job):
    steps = 40

    def build(self) -> nn.Module:
        return Net(block=Attending)

    def batch(self, step: int) -> Any:
        return torch.randn(*((16, 32) if step < CHANGE else (2, 256)), WIDTH)


@kind("autocast, then not")
class Precise(Job):
    steps = 40

    def loss(self, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=step < CHANGE):
            return super().loss(step).float()


@kind("gradient penalty each 8th")
class Penalized(Job):
    steps = 48

    def loss(self, step: int) -> Tensor:
        x = self.batch(step)
        if step % 8 != 7:
            return self.model(x).square().mean()  # type: ignore[no-any-return]
        x.requires_grad_()
        y = self.model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()  # type: ignore[no-any-return]


@kind("larger step each 8th")
class Recurring(Job):
    steps = 48

    def rows(self, step: int) -> int:
        return ROWS + ROWS // 2 if step % 8 == 7 else ROWS


class Routing(Block):
    """Rows go to one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                y = F.gelu(expert(x[rows])) * weight[rows, None]
                mixed = mixed.index_add(0, rows, y)
        return super().forward(x + mixed)


@kind("varying routes")
class Routed(Job):
    steps = 32

    def build(self) -> nn.Module:
        return Net(block=Routing)

    def batch(self, step: int) -> Any:
        return torch.randn(ROWS, WIDTH) + torch.randn(WIDTH)


@kind("lengths in buckets")
class Bucketed(Job):
    steps = 48

    def build(self) -> nn.Module:
        return Net(block=Attending)

    def batch(self, step: int) -> Any:
        return torch.randn(8, (32, 64, 96, 128)[step * 5 % 7 % 4], WIDTH)


class Skipping(Net):
    def forward(self, x: Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 0 or torch.rand(()) > 0.2:
                x = layer(x)
        y: Tensor = self.head(x)
        return y


@kind("stochastic depth")
class Stochastic(Job):
    steps = 60
    expected = "any"

    def build(self) -> nn.Module:
        return Skipping()


@kind("memory that grows")
class Keeping(Job):
    """Keeps another tensor after each of 20 steps: in the end, a tenth of a step's bytes."""

    steps = 44

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def step(self, step: int) -> None:
        super().step(step)
        if CHANGE <= step < CHANGE + 20:
            self.kept.append(torch.ones(6144))


@kind("data in memory, and a batch that grows a little")
class Holding(Job):
    """Holds data of five times a step's bytes, which no budget counts. Batches grow by a tenth."""

    steps = 32

    def __init__(self) -> None:
        super().__init__()
        self.data = torch.randn(ROWS * 360, WIDTH)

    def batch(self, step: int) -> Any:
        rows = ROWS if step < CHANGE else ROWS + ROWS // 10
        return self.data[torch.randint(len(self.data), (rows,))]


@kind("short")
class Short(Job):
    steps = 4
    expected = "silent"


@kind("steps without a backward")
class Idle(Job):
    steps = 32

    def step(self, step: int) -> None:
        if step % 5 == 4:
            self.optimizer.step()
        else:
            super().step(step)


@kind("a second stage")
class Staged(Job):
    """Replaces the model and the optimizer at step CHANGE."""

    steps = 32

    def step(self, step: int) -> None:
        if step == CHANGE:
            self.model = Net(4)
            self.optimizer = self.optimizer_of(self.model)
        super().step(step)
