"""Frameworks with checkpoint functions of their own, here stand-ins with the same names. The real
ones are tested in integration/."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
import sys
import time
import types
import warnings
from contextlib import ExitStack
from importlib.machinery import ModuleSpec

import pytest
import torch

import ebb
from ebb._launch import takeover
from ebb._launch.frameworks import takeover as frameworks
from ebb._launch.frameworks.after_import import AfterImport
from ebb._launch.frameworks.takeover import FRAMEWORKS
from ebb_tests.programs_apart import run_program

MEGATRON = "megatron.core.tensor_parallel.random"
SOURCE = """
import torch

RAN = []

class FP8GlobalStateManager:
    on = False
    @classmethod
    def is_fp8_enabled(cls):
        return cls.on

def checkpoint(function, distribute_saved_activations, *args):
    RAN.append("checkpoint")
    return function(*args)

class CheckpointWithoutOutput:
    def __init__(self, fp8=False):
        self.fp8 = fp8 is not None

    def checkpoint(self, run_function, *args):
        RAN.append("without output")
        return run_function(*args)

    def discard_output_and_register_recompute(self, hook_tensor):
        RAN.append("discard")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a module and the version of its distribution, and forgets both after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("_EBB_TOLD", "")  # lines that were printed once
    known = {name for name in sys.modules if name.split(".")[0] in TOPS}
    for name in known:
        monkeypatch.delitem(sys.modules, name)

    def write(module, source, distribution="megatron-core", version="0.16.9"):
        folder = tmp_path
        *packages, last = module.split(".")
        for part in packages:
            folder /= part
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        importlib.invalidate_caches()

    yield write
    takeover.remove()
    for name in [name for name in sys.modules if name.split(".")[0] in TOPS]:
        del sys.modules[name]


TOPS = {framework.module.split(".")[0] for framework in FRAMEWORKS}


@pytest.fixture
def random(package, take_over):
    """The stand-in of Megatron's module, whose calls are regions."""
    package(MEGATRON, SOURCE)
    take_over()
    return importlib.import_module(MEGATRON)


def block(x):
    return (x * 2).sin().exp()


def entered(call):
    """The gradient of a call's results, and how many regions it entered."""
    ebb.reset_stats()
    x = torch.randn(4, 4, requires_grad=True)
    call(x).sum().backward()
    return x.grad, ebb.stats()["total"]["entered"]


@pytest.mark.parametrize("is_early", [False, True])
def test_calls_are_regions(package, take_over, is_early, capfd):
    package(MEGATRON, SOURCE)
    if is_early:
        random = importlib.import_module(MEGATRON)
    take_over()
    random = importlib.import_module(MEGATRON)

    _, count = entered(lambda x: random.checkpoint(block, False, x))
    random.checkpoint(block, False, torch.ones(1))

    assert count == 1
    assert random.RAN == []
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "ebb: calls of checkpoint of Megatron-Core 0.16.9 (tested: 0.14, 0.15, 0.16) are regions "
        "(EBB=1); EBB_DISABLE=1 turns ebb off"
    ]


def test_functions_are_the_frameworks_own_after_removal(random):
    takeover.remove()

    _, count = entered(lambda x: random.checkpoint(block, False, x))

    assert (count, random.RAN) == (0, ["checkpoint"])
    finders = [finder for finder in sys.meta_path if isinstance(finder, AfterImport)]
    assert len(finders) == 1, "that of transformers' report_to is always there"


@pytest.mark.parametrize(
    ("version", "source", "why"),
    [
        ("0.99.0", SOURCE, "Megatron-Core 0.99.0 are no regions: ebb was tested with 0.14"),
        ("0.16.9", SOURCE.replace("distribute_saved_activations, ", ""), "has changed"),
        ("0.16.9", SOURCE.replace("def discard_output_and", "def drop_output_and"), "has changed"),
        ("0.16.9", SOURCE + "from torch.utils.checkpoint import checkpoint", "has changed"),
    ],
)
def test_unknown_functions_are_left_alone_or_end_a_strict_job(
    package, take_over, version, source, why, capfd, monkeypatch
):
    package(MEGATRON, source, version=version)
    take_over()

    importlib.import_module(MEGATRON)

    (line,) = capfd.readouterr().err.splitlines()
    assert why in line
    assert "EBB_MODULES='*.layers.*'" in line
    takeover.remove()
    del sys.modules[MEGATRON]
    monkeypatch.setenv("EBB_STRICT", "1")
    take_over()
    with pytest.raises(ValueError, match=re.escape(why)):
        importlib.import_module(MEGATRON)


def test_distributed_activations_are_left_to_megatron(random, capfd):
    _, count = entered(lambda x: random.checkpoint(block, True, x))

    assert (count, random.RAN) == (0, ["checkpoint"])
    assert "--distribute-saved-activations is on" in capfd.readouterr().err


def without_output(random, function, **settings):
    """A block whose result the next function saves, and which is discarded after that."""

    def call(x):
        held = random.CheckpointWithoutOutput(**settings)
        y = held.checkpoint(function, x)
        call.sizes = [y.untyped_storage().nbytes()]
        z = y * y
        held.discard_output_and_register_recompute(z)
        call.sizes.append(y.untyped_storage().nbytes())
        return z

    return call


def test_results_are_discarded(random):
    call = without_output(random, block)
    torch.manual_seed(1)

    found, count = entered(call)

    assert (count, random.RAN) == (1, [])
    assert call.sizes == [64, 0]
    assert torch.equal(found, gradient_of_square(1))


def gradient_of_square(seed):
    torch.manual_seed(seed)
    x = torch.randn(4, 4, requires_grad=True)
    y = block(x)
    (y * y).sum().backward()
    return x.grad


def test_result_that_is_a_view_of_an_input_is_not_discarded(random):
    call = without_output(random, lambda x: x.view(2, 8))

    _, count = entered(call)

    assert count == 1
    assert call.sizes == [64, 64]


def test_real_fp8_is_left_to_megatron(random, capfd):
    random.FP8GlobalStateManager.on = True

    _, count = entered(without_output(random, block))

    assert (count, random.RAN) == (0, ["without output", "discard"])
    assert "FP8 is on" in capfd.readouterr().err


def test_warm_up_of_a_graph_is_left_to_megatron(package, random):
    package("megatron.core.transformer.cuda_graphs", "def is_graph_warmup(): return True", "x")
    importlib.import_module("megatron.core.transformer.cuda_graphs")

    _, count = entered(without_output(random, block))

    assert (count, random.RAN) == (0, ["without output", "discard"])


def test_module_that_fails_to_import_raises_its_own_error(package, take_over):
    package(MEGATRON, "raise RuntimeError('no GPU')")
    take_over()

    with pytest.raises(RuntimeError, match="no GPU"):
        importlib.import_module(MEGATRON)


def test_loader_and_source_are_unchanged(random):
    assert "exec_module" not in vars(random.__loader__)
    assert random.__spec__.loader.get_source(MEGATRON) == SOURCE
    assert importlib.reload(random).RAN == []


SCRIPT = """
import torch
import ebb
from megatron.core.tensor_parallel.random import checkpoint

x = torch.randn(4, 4, requires_grad=True)
checkpoint(lambda x: x.sin().exp(), False, x).sum().backward()
print(ebb.stats()["total"]["entered"])
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("value", "regions"), [("1", "1"), ("0", "0")])
def test_job_in_a_process(package, tmp_path, value, regions):
    package(MEGATRON, SOURCE)
    (tmp_path / "train.py").write_text(SCRIPT)

    done = run_program(tmp_path / "train.py", EBB=value)

    assert done.stdout.split() == [regions]
    assert ("calls of checkpoint of Megatron-Core" in done.stderr) == (value == "1")


def test_several_finders_may_wait_for_one_module(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finders = [
        AfterImport({"waited_for": lambda module, n=n: seen.append((n, module.value))})
        for n in range(3)
    ]
    for finder in finders:
        finder.install()
    try:
        module = importlib.import_module("waited_for")
        importlib.reload(module)
    finally:
        for finder in finders:
            finder.remove()
        del sys.modules["waited_for"]
    assert sorted(seen) == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]


DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


def test_keywords_have_any_name(package, take_over):
    source = "def checkpoint(function, *args, **kwargs): return function(*args, **kwargs)\n"
    package(
        DEEPSPEED, source + source.replace("def c", "def non_reentrant_c"), "deepspeed", "0.19.1"
    )
    take_over()
    checkpoint = importlib.import_module(DEEPSPEED).checkpoint

    def function(x, *, original, framework, what):
        return x * original * framework * what

    x = torch.ones(2, requires_grad=True)
    found = checkpoint(function, x, original=2.0, framework=3.0, what=4.0)

    assert torch.equal(found, torch.full((2,), 24.0))


@pytest.mark.parametrize("kind", ["returned twice", "discarded twice", "written"])
def test_result_may_be_returned_twice_discarded_twice_or_written(random, kind):
    held = random.CheckpointWithoutOutput()

    def program(x):
        y = held.checkpoint(lambda x: (x.sin(),) * (2 if kind == "returned twice" else 1), x)[0]
        z = y.exp() if kind == "written" else y * 3
        if kind == "written":
            y.mul_(2)
        for _ in range(2 if kind == "discarded twice" else 1):
            held.discard_output_and_register_recompute(z)
        return z

    torch.manual_seed(1)
    found, count = entered(program)

    torch.manual_seed(1)
    x = torch.randn(4, 4, requires_grad=True)
    (x.sin().exp() if kind == "written" else x.sin() * 3).sum().backward()
    assert count == 1
    assert torch.equal(found, x.grad)


class OldFinder:
    """Without find_spec, as import hooks before Python 3.4."""

    def find_module(self, name, path=None):
        return None


class OldLoader:
    def load_module(self, name):
        module = sys.modules[name] = types.ModuleType(name)
        module.checkpoint = "its own"
        return module


class FixedLoader(importlib.abc.Loader):
    __slots__ = ()

    def exec_module(self, module):
        module.checkpoint = "its own"


@pytest.mark.parametrize("loader", [OldLoader, FixedLoader])
def test_import_hooks_of_other_kinds_work(monkeypatch, loader, package, take_over):
    package("megatron.core.tensor_parallel.other", "")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            return ModuleSpec(name, loader()) if name == MEGATRON else None

    monkeypatch.setattr(sys, "meta_path", [OldFinder(), Finder(), *sys.meta_path])
    take_over()

    with warnings.catch_warnings(action="ignore"):
        assert importlib.import_module(MEGATRON).checkpoint == "its own"


def test_job_without_frameworks_hardly_pays(monkeypatch):
    for framework in FRAMEWORKS:
        monkeypatch.delitem(sys.modules, framework.module, raising=False)  # other tests import them
    seconds = []
    for _ in range(20):
        with ExitStack() as undo:
            began = time.perf_counter()
            frameworks.take_over(undo)
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 2e-4

    finder = AfterImport(dict.fromkeys(framework.module for framework in FRAMEWORKS))
    began = time.perf_counter()
    for _ in range(1000):
        finder.find_spec("json.decoder", None)
    assert time.perf_counter() - began < 0.01


class SharedLoader(importlib.abc.Loader):
    """One for several modules, as that of a zip file."""

    def exec_module(self, module):
        module.checkpoint = "its own"


def test_loader_of_several_modules(package, take_over, monkeypatch, capfd):
    package("megatron.core.tensor_parallel.other", "")
    loader = SharedLoader()

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            return ModuleSpec(name, loader) if name.startswith(f"{MEGATRON[:-7]}.") else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    take_over()

    importlib.util.find_spec(MEGATRON)  # it is only looked for
    importlib.import_module("megatron.core.tensor_parallel.layers")

    assert capfd.readouterr().err == ""
