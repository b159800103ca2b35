"""A simulated accelerator for tests, "late". Built on first use, for each torch version.

Once registered, it is torch's accelerator for the rest of the process. It has two devices, memory
that the host cannot access, streams that run when something waits for them or after random delays,
a race detector, graphs, an allocator and a page mover.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

Context = contextlib.AbstractContextManager[None]

HERE = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "late"
DRAWS = ("from device", "from cpu", "from both", "from hidden")
DEVICES = 2
TELLS_OF_CAPTURES = hasattr(torch.Stream, "is_capturing")  # torch 2.12 and later


def _library() -> Path:
    """The compiled library; ten to sixty seconds the first time."""
    made_of = [Path(__file__), HERE / "late.cpp", *sorted(HERE.glob("*.h"))]
    made_of += sorted((ROOT / "src" / "plugins" / "paging" / "pool").glob("*.h"))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in made_of)).hexdigest()[:12]
    library = BUILD / f"late-{torch.__version__}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
        command += [f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]
        command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        command += [str(HERE / "late.cpp"), "-o", str(made)]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += ["-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        made.replace(library)
    return library


def _module() -> types.ModuleType:
    """What `torch.late` is to be."""
    module = types.ModuleType("late")
    module._initialized = True
    ops = torch.ops.late

    def index(device: int | str | torch.device | None) -> int:
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return ops.current_device() if number is None else number

    @contextlib.contextmanager
    def device(chosen: int | str | torch.device) -> Iterator[None]:
        before = ops.current_device()
        ops.set_device(index(chosen))
        try:
            yield
        finally:
            ops.set_device(before)

    for name, function in {
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": ops.current_device,
        "set_device": ops.set_device,
        "manual_seed": ops.manual_seed,
        "manual_seed_all": ops.manual_seed,
        "get_rng_state": lambda device=None: ops.random_state(index(device)),
        "set_rng_state": lambda state, device=None: ops.set_random_state(state, index(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }.items():
        setattr(module, name, function)
    return module


def load() -> torch.device:
    """Registers the device, once; gives the first one. Its allocator asks ebb for memory."""
    from ebb import _testing

    if "late" not in sys.modules:
        library = _library()
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # ebb looks up a function by name
        torch.ops.load_library(library)
        sys.modules["late"] = _module()
        torch.utils.rename_privateuse1_backend("late")
        torch._register_device_module("late", sys.modules["late"])
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        torch.ops.late.call_when_short(_testing.give_back_function())
    return torch.device("late", 0)


def have_pages() -> None:
    """From now on ebb has page pools on it."""
    from ebb import _testing

    cpu = _testing.cpu_page_mover()
    _testing.set_page_mover(torch.ops.late.page_mover(cpu))


def synchronize() -> None:
    """The host waits for all devices."""
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def behind(stream: torch.Stream, other: torch.Stream) -> Iterator[None]:
    """Inside, `stream` is the current one. It has waited for `other`."""
    stream.wait_stream(other)
    with stream:
        yield


def findings() -> list[str]:
    """Races, and what kernels raised, since the last call."""
    return [*torch.ops.late.races(), *torch.ops.late.errors()]


@contextlib.contextmanager
def _inside(set_to: Callable[..., None], inside: Any, outside: Any) -> Iterator[None]:
    set_to(*inside)
    try:
        yield
    finally:
        set_to(*outside)


@contextlib.contextmanager
def drawing(whose: str, *, generator: bool = True) -> Iterator[None]:
    """Inside, random operators on the device draw from a generator of DRAWS; `generator`: whether
    the device says that it has one."""
    ops = torch.ops.late
    with (
        _inside(ops.draw_from, (DRAWS.index(whose),), (0,)),
        _inside(ops.have_generator, (generator,), (True,)),
    ):
        yield


def delayed(compute: int, side: int) -> Context:
    """Inside, streams run by themselves, each task up to so many microseconds late: `compute` those
    of default streams, `side` all others."""
    return _inside(torch.ops.late.configure, (False, compute, side), (True, 0, 0))


def unsteady() -> Context:
    """Inside, the n-th call of each operator that adds, writes or picks in any order gives other
    last bits, or other indices, than the calls before."""
    return _inside(torch.ops.late.be_unsteady, (True,), (False,))


def uncounted() -> Context:
    """Inside, the devices' allocator counts no bytes."""
    return _inside(torch.ops.late.count_bytes, (False,), (True,))


def limited(*, device: int = -1, host: int = -1) -> Context:
    """Inside, so many bytes of memory may be in use on each device, and pinned."""
    return _inside(torch.ops.late.limit, (device, host), (-1, -1))


def shared(*, others: int) -> Context:
    """Inside, other processes have so many bytes of each device's memory."""
    return _inside(torch.ops.late.let_others_have, (others,), (0,))


def without_free_memory_callback() -> Context:
    """Inside, the allocator does not call ebb when it runs short."""
    from ebb import _testing

    return _inside(torch.ops.late.call_when_short, (0,), (_testing.give_back_function(),))


def broken(*, after: int = 0) -> Context:
    """Inside, every call fails after so many more, as after a device's assert."""
    return _inside(torch.ops.late.break_device, (after,), (-1,))


class Graph:
    """What its streams are given inside `capture` runs at each `replay`, on the current stream."""

    def __init__(self) -> None:
        self._number = 0

    @contextlib.contextmanager
    def capture(self, stream: torch.Stream) -> Iterator[Graph]:
        synchronize()
        with stream:
            torch.ops.late.begin_capture()
            try:
                yield self
            except BaseException:
                torch.ops.late.abandon_capture()
                raise
            self._number = torch.ops.late.end_capture()

    def replay(self) -> None:
        torch.ops.late.replay(self._number)

    def replay_and_wait(self) -> None:
        self.replay()
        synchronize()


def each_wait_left_out(program: Callable[[], object]) -> Iterator[tuple[int, object, list[str]]]:
    """Runs `program` once whole, and then again for each wait in it, with that one left out: gives
    which, what the program gave, and what was found. The first one, -1, is the whole."""
    torch.ops.late.drop_wait(-1)
    result = program()
    synchronize()
    count = torch.ops.late.drop_wait(-1)
    yield -1, result, findings()
    for which in range(count):
        torch.ops.late.drop_wait(which)
        try:
            result = program()
            synchronize()
        finally:
            torch.ops.late.drop_wait(-1)
        yield which, result, findings()
