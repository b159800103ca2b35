"""Shared by the tests of integrations: a framework's own checkpointing with and without ebb."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebb
from ebb._launch import takeover

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from held_bytes import held_and_peak_of

Loss = Callable[[], Tensor]
Make = Callable[[], tuple[nn.Module, Loss]]  # a model, and the loss of a step with it


class Block(nn.Module):
    """A block with dropout and a normalization."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class Stack(nn.Module):
    """Blocks in a row. `call`: called with each block and its input."""

    def __init__(
        self, call: Callable[[nn.Module, Tensor], Tensor], block: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = self.call(block, x)
        return x


def stack(
    call: Callable[[nn.Module, Tensor], Tensor],
    block: Callable[[], nn.Module] = Block,
    width: int = 32,
) -> Make:
    """Four blocks in a row."""

    def make() -> tuple[nn.Module, Loss]:
        model = Stack(call, block)
        x = torch.randn(8, 16, width, requires_grad=True)
        return model, lambda: model(x).square().mean()

    return make


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def without_dropout(call: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    """For checkpoint functions that do not restore the random state when they recompute."""

    def called(block: Any, x: Tensor) -> Tensor:
        block.dropout.p = 0.0
        return call(block, x)

    return called


@dataclass
class Step:
    """Results of three training steps."""

    results: list[Tensor]  # losses, the last gradients, parameters, buffers, a random number
    held: int  # bytes after the forward of one more step
    entered: int  # regions in the last of the three steps
    replayed: int  # operators that ebb recomputed in that step


def train(make: Make) -> Step:
    torch.manual_seed(1)
    model, loss = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        ebb.reset_stats()
        value = loss()
        value.backward()
        results.append(value.detach())
        optimizer.step()
    counts = ebb.stats()["total"]
    results += [p.grad.clone() for p in trained if p.grad is not None]
    results += [tensor.detach().clone() for tensor in (*trained, *model.buffers())]
    results.append(torch.rand(1))
    held = held_and_peak_of(loss)["held_bytes"]
    return Step(results, held, counts["entered"], counts["ops_replayed"])


@contextmanager
def taken_over(*, finds_blocks: bool = False) -> Iterator[None]:
    """EBB=1. `finds_blocks`: as in a job that sets no EBB_MODULES."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("_EBB_TOLD", "")  # lines that were printed once
        takeover.install(ebb.policies.recompute_all, "1", (), finds_blocks=finds_blocks)
        try:
            yield
        finally:
            takeover.remove()


def same(one: Step, other: Step) -> bool:
    return len(one.results) == len(other.results) and all(
        map(torch.equal, one.results, other.results)
    )


def check_regions(
    eager: Make | None, own: Make, regions: int, *, adds: bool = False, is_exact: bool = True
) -> None:
    """Checks that the framework's calls become regions: `regions` of them, with the same results,
    and no more bytes held.

    Args:
        eager: the same steps without checkpointing.
        own: with the framework's checkpointing.
        adds: True if `own` does not checkpoint, and ebb makes its blocks regions.
        is_exact: False if the framework's own results are not those without checkpointing.
    """
    by_itself = train(own)
    with taken_over(finds_blocks=True):
        with_ebb = train(own)
    assert same(with_ebb, by_itself) == is_exact
    if eager is not None:
        without = train(eager)
        assert same(with_ebb, without)
        assert with_ebb.held < without.held
    assert by_itself.entered == 0
    assert with_ebb.entered == regions, with_ebb.entered
    assert with_ebb.replayed > 0
    assert with_ebb.held <= (0.8 if adds else 1.0) * by_itself.held + 2**10


def said_by_ebb(capfd: Any) -> list[str]:
    """The lines that ebb printed since the last call; torch's profiler prints others."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("ebb: ")]


def check_left_alone(eager: Make | None, own: Make, capfd: Any, line: str) -> None:
    """Checks that the framework recomputes its blocks by itself, and that ebb says so."""
    by_itself = train(own)
    capfd.readouterr()
    with taken_over(finds_blocks=True):
        with_ebb = train(own)
    said = said_by_ebb(capfd)
    assert same(with_ebb, by_itself)
    if eager is not None:
        assert same(with_ebb, train(eager))
    assert with_ebb.entered == 0
    assert with_ebb.held <= 1.01 * by_itself.held + 2**10
    assert len(said) == 1, said
    assert said[0].startswith(line)


def in_context(make: Make, context: Callable[[], AbstractContextManager[Any]]) -> Make:
    """The steps of `make`, each inside a context that `context` makes."""

    def made() -> tuple[nn.Module, Loss]:
        model, loss = make()

        def inside() -> Tensor:
            with context():
                return loss()

        return model, inside

    return made


def check_offloading(eager: Make, own: Make, capfd: Any, hooks: str = "") -> None:
    """Checks that layers inside of the framework's offloading hooks become regions.

    `hooks`: class of hooks that do not offload the tensors that regions save; ebb says so. Empty:
    the hooks get the arguments of checkpointed calls, and ebb says nothing of them.
    """
    by_itself = train(own)
    capfd.readouterr()
    with taken_over(finds_blocks=True):
        found = train(own)

    assert same(found, by_itself)
    assert same(found, train(eager))
    assert found.entered == 4
    said = [line for line in said_by_ebb(capfd) if "saved-tensor hooks of the job" in line]
    assert [f"({hooks}) do not get the tensors" in line for line in said] == [True] * bool(hooks)
    assert hooks or found.held <= 1.01 * by_itself.held + 2**10


def tiny_llama(
    checkpoints: bool, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[nn.Module, Loss]:
    """A Llama with four layers. `wrap`: called with the model before checkpointing is enabled."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = wrap(transformers.LlamaForCausalLM(config))
    model.train()
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    words = torch.randint(64, (4, 32))
    return model, lambda: model(input_ids=words, labels=words).loss


def cuda_is_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to CUDA stay on the CPU."""
    to = Tensor.to

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *("cpu" if arg == "cuda" else arg for arg in args), **kwargs)

    monkeypatch.setattr(Tensor, "to", moved)


@contextmanager
def bare_packages(module: str) -> Iterator[None]:
    """Makes the packages around `module` importable without running their ``__init__``, which
    import what a CPU lacks. Skips the test if the distribution is not installed."""
    top = module.partition(".")[0]
    folder = _folder_of(top)
    before = set(sys.modules)
    parts = module.split(".")[:-1]
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if name not in sys.modules:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder.joinpath(*parts[1:count]))]
            sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == top:
                del sys.modules[name]


def _folder_of(top: str) -> Path:
    for folder in sys.path:
        if (found := Path(folder, top)).joinpath("__init__.py").is_file():
            return found
    pytest.skip(f"needs {top}", allow_module_level=True)


def load(module: str) -> Any:
    """One module of a framework, without its package's ``__init__``; skips if not installed."""
    with bare_packages(module):
        return importlib.import_module(module)


class _Anything(type):
    """Classes of modules that are not there: each has any attribute, and calls return one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _anything(name: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        return _anything(name)

    return _Anything(name, (), {"__init__": lambda *_, **__: None, "__call__": call})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not installed, as modules with any name inside."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = any(f"{name}.".startswith(f"{top}.") for top in self._names)
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def exec_module(self, module: Any) -> None:
        module.__version__ = "0"
        module.__path__ = []
        module.__getattr__ = _Anything.__getattr__.__get__(module)


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Stand-ins for packages that a framework imports and that these tests do not call."""
    finder = _Absent(names)
    sys.meta_path.append(finder)  # the last one: installed packages stay what they are
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.find_spec(name)]:
            if isinstance(getattr(sys.modules[name], "__loader__", None), _Absent):
                del sys.modules[name]


def with_torchvision(module: str) -> Any:
    """A module of torchvision, without its compiled operators where these need CUDA."""
    pytest.importorskip("PIL", reason="needs pillow")
    register = torch.library.register_fake

    def only_known(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.library, "register_fake", only_known)
        return pytest.importorskip(module, reason="needs torchvision")
