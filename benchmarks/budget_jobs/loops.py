"""Kinds of training loops: what one step does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from budget_jobs.job import ROWS, WIDTH, Block, Job, Net, add_bits, kind


@kind("plain")
class Plain(Job):
    pass


@kind("accumulation")
class Accumulating(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for _ in range(3):
            loss = self.loss(step)
            loss.backward()
            self.note(loss)
            del loss
        self.optimizer.step()


@kind("gradient scaler")
class Scaled(Job):
    """Autocast, and a scaler that skips some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(step)
        self.scaler.scale(loss).backward()
        if step in (0, 1, 4, 11):
            self.model.head.bias.grad.fill_(torch.inf)
        self.note(loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@kind("closures, LBFGS")
class Closures(Job):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)

    def step(self, step: int) -> None:
        x = self.batch(step)

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.note(loss)
            return float(loss)

        self.optimizer.step(closure)


@kind("clip by norm")
class Clipped(Job):
    def note(self, *losses: Tensor) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().note(*losses)


@kind("functional_call")
class Functional(Job):
    def loss(self, step: int) -> Tensor:
        values = {name: p * 1.0 for name, p in self.model.named_parameters()}
        y = torch.func.functional_call(self.model, values, (self.batch(step),))
        return y.square().mean()  # type: ignore[no-any-return]


@kind("torch.func.grad")
class Transformed(Job):
    expected = "any"

    def build(self) -> nn.Module:
        return Net(block=lambda: Block(dropout=0.0))

    def step(self, step: int) -> None:
        x = self.batch(step)

        def loss_of(values: dict[str, Tensor]) -> Tensor:
            y = torch.func.functional_call(self.model, values, (x,))
            return y.square().mean()  # type: ignore[no-any-return]

        values = {name: p.detach() for name, p in self.model.named_parameters()}
        gradients, loss = torch.func.grad_and_value(loss_of)(values)
        for name, p in self.model.named_parameters():
            p.grad = gradients[name]
        self.note(loss)
        self.optimizer.step()


@kind("autograd.grad")
class Asked(Job):
    def step(self, step: int) -> None:
        loss = self.loss(step)
        parameters = list(self.model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        self.note(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


@kind("tied weights")
class Tied(Job):
    def build(self) -> nn.Module:
        net = Net()
        for layer in net.layers[1:]:
            layer.up.weight = net.layers[0].up.weight
        return net


@kind("a layer used twice")
class Shared(Job):
    def build(self) -> nn.Module:
        net = Net(3)
        net.layers.extend(net.layers[:3])
        return net


@kind("gradients of zeros")
class Zeroed(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        self.optimizer.step()


@kind("zero_grad after the step")
class ZeroedAfter(Job):
    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


@kind("optimizer in backward")
class InBackward(Job):
    expected = "none"

    def __init__(self) -> None:
        super().__init__()
        self.all = {p: torch.optim.SGD([p], lr=0.01) for p in self.model.parameters()}
        self.handles = [
            p.register_post_accumulate_grad_hook(lambda p, own=own: self.one_step(p, own))
            for p, own in self.all.items()
        ]

    def close(self) -> None:
        for handle in self.handles:  # else the garbage collector never frees the job
            handle.remove()

    def one_step(self, p: Tensor, own: torch.optim.Optimizer) -> None:
        add_bits(self._digests["gradients"], [p.grad])
        own.step()
        own.zero_grad()

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)


@kind("two optimizers in a step")
class TwoOptimizers(Job):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.layers.parameters(), lr=1e-3)
        self.second = torch.optim.SGD(self.model.head.parameters(), lr=1e-2)

    def step(self, step: int) -> None:
        self.second.zero_grad()
        super().step(step)
        self.second.step()


@kind("no optimizer")
class ByHand(Job):
    expected = "silent"

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.01 * p.grad
                p.grad = None


@kind("SAM")
class Sharpness(Job):
    """Two forwards and backwards in a step, the second with moved weights."""

    def step(self, step: int) -> None:
        x = self.batch(step)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            moves = [0.01 * p.grad for p in self.model.parameters()]
            for p, move in zip(self.model.parameters(), moves, strict=True):
                p += move
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.note(loss)
        with torch.no_grad():
            for p, move in zip(self.model.parameters(), moves, strict=True):
                p -= move
        self.optimizer.step()


@kind("MAML")
class Maml(Job):
    def build(self) -> nn.Module:
        return Net(4)

    def loss(self, step: int) -> Tensor:
        values = dict(self.model.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(self.model, values, (self.batch(step)[:128],))
            slopes = torch.autograd.grad(
                inner.square().mean(), tuple(values.values()), create_graph=True
            )
            pairs = zip(values.items(), slopes, strict=True)
            values = {name: value - 0.01 * slope for (name, value), slope in pairs}
        y = torch.func.functional_call(self.model, values, (self.batch(step)[:256],))
        return y.square().mean()  # type: ignore[no-any-return]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.block = Block()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        y: Tensor = self.block(self.cell(x, h))
        return y


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        following = []
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
            following.append(x)
        return self.head(x), following


@kind("truncated backward through time")
class ThroughTime(Job):
    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(ROWS // 4, WIDTH) for _ in range(4)]

    def build(self) -> nn.Module:
        return Truncated()

    def loss(self, step: int) -> Tensor:
        states = [state.detach() for state in self.states]
        total = torch.zeros(())
        for _ in range(4):
            y, states = self.model(torch.randn(ROWS // 4, WIDTH), states)
            total = total + y.square().mean()
        self.states = [state.detach() for state in states]
        return total


@kind("a graph kept for two backwards")
class TwoBackwards(Job):
    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        y = self.model(self.batch(step))
        first, second = y.square().mean(), y.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        self.note(first, second)
        self.optimizer.step()
