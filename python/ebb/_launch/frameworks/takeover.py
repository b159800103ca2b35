"""Takes over the checkpoint functions of frameworks, now or when a framework is imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

from ebb._launch.checkpoint_calls import copy_of, exchange
from ebb._launch.frameworks import calls
from ebb._launch.frameworks.after_import import AfterImport
from ebb._launch.variables import warn_setting_ignored


@dataclass(frozen=True)
class Framework:
    """One module of a framework."""

    name: str  # for messages
    distribution: str  # its name in the package index, which gives the version
    tested: tuple[str, ...]  # versions with which the functions were tested, without the last part
    module: str  # defines the functions
    # Names of functions, each with its replacement, which takes the original function and then the
    # same arguments.
    functions: Mapping[str, Callable[..., Any]]


_MEGATRON = ("Megatron-Core", "megatron-core", ("0.14", "0.15", "0.16"))
FRAMEWORKS = (
    Framework(
        *_MEGATRON,
        "megatron.core.tensor_parallel.random",
        {
            "checkpoint": calls.megatron,
            "CheckpointWithoutOutput.checkpoint": calls.without_output,
            "CheckpointWithoutOutput.discard_output_and_register_recompute": calls.discard_output,
        },
    ),
    Framework(*_MEGATRON, "megatron.core.utils", {"GlobalMemoryBuffer.get_tensor": calls.buffer}),
    Framework(
        "DeepSpeed",
        "deepspeed",
        ("0.18", "0.19"),
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        {"checkpoint": calls.deepspeed, "non_reentrant_checkpoint": calls.deepspeed},
    ),
)


def take_over(undo: ExitStack) -> None:
    """Make the checkpoint calls of frameworks regions until `undo` is closed."""
    finder = AfterImport({each.module: functools.partial(_take, each, undo) for each in FRAMEWORKS})
    finder.install()
    undo.callback(finder.remove)


def _take(framework: Framework, undo: ExitStack, module: ModuleType) -> None:
    try:
        version = metadata.version(framework.distribution)
    except metadata.PackageNotFoundError:
        version = "of an unknown version"
    if ".".join(version.split(".")[:2]) not in framework.tested:
        _leave(framework, version, f"ebb was tested with {', '.join(framework.tested)}")
        return
    found: list[tuple[FunctionType, Callable[..., Any]]] = []
    for name, replacement in framework.functions.items():
        function = _function(module, name)
        if function is None or not _takes_the_same(function, replacement):
            why = f"{framework.module}.{name} has changed since ebb was tested with it"
            _leave(framework, version, why)
            return
        found.append((function, functools.partial(replacement, copy_of(function))))
    tested = ", ".join(framework.tested)
    calls.VERSIONS[framework.name] = f"{framework.name} {version} (tested: {tested})"
    for function, instead in found:
        undo.callback(exchange(function, instead))


def _function(module: ModuleType, name: str) -> FunctionType | None:
    """The innermost function behind decorators, if the module defines it."""
    try:
        function = inspect.unwrap(attrgetter(name)(module))
    except (AttributeError, ValueError):
        return None
    is_own = isinstance(function, FunctionType) and function.__module__ == module.__name__
    return function if is_own else None


def _takes_the_same(function: FunctionType, replacement: Callable[..., Any]) -> bool:
    """True if `replacement` takes the arguments of `function` after the original function, and
    perhaps any keywords besides."""
    given, (_, *taken) = (
        [(p.name, p.kind) for p in inspect.signature(one).parameters.values()]
        for one in (function, replacement)
    )
    more = taken[len(given) :]
    is_more = not more or [kind for _, kind in more] == [inspect.Parameter.VAR_KEYWORD]
    return taken[: len(given)] == given and is_more and not function.__closure__


def _leave(framework: Framework, version: str, why: str) -> None:
    warn_setting_ignored(
        f"ebb: checkpoint calls of {framework.name} {version} are no regions",
        f"{why}. Name its blocks instead, such as EBB_MODULES='*.layers.*', and turn "
        f"{framework.name}'s own recomputation off",
    )
