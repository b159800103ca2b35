"""Runs CUDA kernels on the CPU: compiled by the host's compiler, on fibers with a random scheduler.
Each memory access is checked. See Note [Emulated kernels] in emulator.h."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "emulated_cuda"
POOL = ROOT / "src/plugins/paging/pool"
EXPORT = ROOT / "include/ebb/export.h"

EMULATOR = ("emulator", "fibers", "hooks", "memory", "order")

# Constants of page kernels that fuzz.cpp chooses: fields of Sizes in emulator.h.
SIZES = ("kThreads", "kWarp", "kPiece", "kBlocksPerProcessor", "kResetBlocks")

# Accesses that the compiler does not report, and features that are not emulated.
UNSEEN = r"\b(memcpy|memmove|memset|std::copy\w*|std::fill\w*|asm|volatile|extern __shared__)\b"

FLAGS = ["-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE"]
FLAGS += [f"-I{HERE}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}"]

# hooks.cpp sees accesses to memory. Local arrays, which are not device memory, trap out of bounds.
WATCHED = ["-fsanitize=thread", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]


class ConversionError(Exception):
    """The source has something that the conversion does not know."""


def convert(source: str, sizes: tuple[str, ...] = ()) -> str:
    """CUDA's own syntax as C++: launches, shared memory, and `sizes` as variables. Lines stay."""
    for name in sizes:
        variable = f"static const int& {name} = emulated::sizes.{name};"
        source, count = re.subn(rf"constexpr int {name} = \w+;", variable, source)
        if count != 1:
            raise ConversionError(f"{name} is defined {count} times")
    source = re.sub(r"__shared__ (\w+) (\w+);", r"\1& \2 = emulated::shared<\1>(__LINE__);", source)
    kernel, numbers = r"([\w>-]+\w|\w+(?:<[\w(), ]+>)?)", r"([^;]*?)"
    launch = rf"{kernel}(\s*)<<<{numbers}>>>\((?!\))"
    source = re.sub(launch, r"emulated::launch(\3, \1,\2", source)
    if left := re.search(rf"<<<|>>>|__shared__|{UNSEEN}", source):
        line = source[: left.start()].count("\n") + 1
        raise ConversionError(f"line {line} has {left.group()!r}, which is not emulated")
    return source


def _key(*parts: str | bytes) -> str:
    joined = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:16]


def _made(target: Path, command: list[str]) -> Path:
    """Runs the command, which makes a file, unless it is there already."""
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(made)], check=True)
        made.replace(target)
    return target


def _compiled(source: Path, text: str, *flags: str) -> Path:
    headers = [*sorted([*HERE.glob("*.h"), *POOL.glob("*.h")]), EXPORT]
    compiler = os.environ.get("CXX", "c++")
    key = _key(compiler, *FLAGS, *flags, text, *(header.read_bytes() for header in headers))
    target = BUILD / f"{source.stem}-{key}.o"
    if not source.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
    return _made(target, [compiler, *FLAGS, *flags, "-c", str(source)])


def build(kernels: str, *host: Path, sizes: tuple[str, ...] = ()) -> Path:
    """A program of kernels, CUDA source as text, and of the host's files; seconds the first time,
    and at once where nothing has changed."""
    text = convert(kernels, sizes)
    source = BUILD / f"kernels-{_key(text)}.cpp"
    files = [*(HERE / f"{name}.cpp" for name in EMULATOR), *host]
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.submit(_compiled, source, text, *WATCHED)
        objects = list(pool.map(lambda file: _compiled(file, file.read_text()), files))
        objects.append(compiled.result())
    program = BUILD / f"program-{_key(*(file.name for file in objects))}"
    return _made(program, [os.environ.get("CXX", "c++"), *map(str, objects)])


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the libraries of sanitizers that the tests may run under: they know no fibers."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
