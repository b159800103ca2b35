"""The build of the C++ part with CMake, once for each torch. setup.py imports this file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = ("c++", "g++", "clang++")  # as CMake looks for them


def check_compiler() -> None:
    """Ends the build if there is no C++ compiler, before CMake says so in many lines."""
    if "CMAKE_CXX_COMPILER" in (arguments := os.environ.get("EBB_CMAKE_ARGS", "")):
        return
    if "CMAKE_TOOLCHAIN_FILE" in arguments:
        return
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if not any(map(shutil.which, named or COMPILERS)):
        missing = f"CXX={named[0]} does not exist" if named else "no C++ compiler is on the path"
        sys.exit(
            f"error: ebb needs a C++20 compiler to build from source, and {missing}. Install one "
            "(apt install g++, or dnf install gcc-c++) and run pip again, or install a wheel of "
            "torch-ebb, which needs no compiler."
        )


def commit_of(folder: Path) -> str:
    """The commit of a checkout, with "-dirty" after changes; "unknown" outside of git."""
    git = ("git", "-C", str(folder))
    try:
        # The folder may lie inside another project's checkout.
        if Path(_output(*git, "rev-parse", "--show-toplevel")).resolve() != folder.resolve():
            return "unknown"
        return _output(*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return done.stdout.strip()


def forget_tools_that_are_gone(folder: Path) -> None:
    """pip builds with a ninja in a folder that it then removes; CMake's cache goes on naming it."""
    cache = folder / "CMakeCache.txt"
    if cache.exists():
        for line in cache.read_text().splitlines():
            if line.startswith("CMAKE_MAKE_PROGRAM:") and not Path(line.split("=", 1)[1]).exists():
                cache.unlink()
                return


class CMakeBuild(build_ext):
    """Builds the C++ part for each torch in `releases`."""

    releases: dict[str, Path]  # the folder of each torch release; setup.py sets it

    def run(self) -> None:
        """Builds for a wheel, or into the source tree, from which an editable install runs."""
        package = (ROOT / "python" if self.inplace else Path(self.build_lib).resolve()) / "ebb"
        for number, (release, torch) in enumerate(self.releases.items(), 1):
            # `make wheel` shows lines that begin with "ebb: ".
            print(f"ebb: torch {release}, {number} of {len(self.releases)} ..", flush=True)
            began, cpu = time.monotonic(), sum(os.times()[:4])
            self.build_for(release, torch, package / "_native" / f"torch-{release}")
            took, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu
            print(f"ebb: torch {release}: {took:.0f} s, {cpu:.0f} s of CPU time", flush=True)

    def build_for(self, release: str, torch: Path, folder: Path) -> None:
        build = Path(os.environ.get("EBB_BUILD_DIR", ROOT / "build" / f"cmake-{release}"))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DEBB_TORCH_DIR={torch}",
            f"-DEBB_PYTHON_INCLUDE_DIR={sysconfig.get_path('include')}",
            f"-DEBB_MODULE_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            f"-DEBB_RELOCATABLE={'OFF' if self.inplace else 'ON'}",
            f"-DEBB_CUDA={os.environ.get('EBB_CUDA', 'auto')}",
            f"-DEBB_MANYLINUX={os.environ.get('EBB_MANYLINUX', '0')}",
            f"-DEBB_SANITIZE={os.environ.get('EBB_SANITIZE', '')}",
            f"-DEBB_TESTING={os.environ.get('EBB_TESTING', '0')}",
            *os.environ.get("EBB_CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        forget_tools_that_are_gone(build)
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        # A library that an earlier build left fits that build's libebb only.
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["cmake", "--install", str(build), "--prefix", str(folder)], check=True)
        (folder / "commit.txt").write_text(commit_of(ROOT) + "\n")


class CleanBuild(build):
    def run(self) -> None:
        """What earlier builds left would be packed too: modules that are not there any more."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
