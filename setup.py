"""Builds the C++ part with CMake, once for each torch; everything else is in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def torch_folders() -> list[Path]:
    """Each torch to build against, found without importing it: a build in isolation cannot."""
    override = os.environ.get("EBB_TORCH_DIR")
    if override:
        return [Path(folder).resolve() for folder in override.split(os.pathsep)]
    for key in ("platlib", "purelib"):
        candidate = Path(sysconfig.get_path(key)) / "torch"
        if (candidate / "version.py").exists():
            return [candidate]
    sys.exit(
        "error: ebb is built against the torch that it will run with, and none is installed in "
        f"{sysconfig.get_path('platlib')}.\nInstall it first: pip install torch==2.13.0\n"
        "or name the package's folder in EBB_TORCH_DIR."
    )


def release_of(torch: Path) -> str:
    """The version without what names a build, such as +cu130."""
    found = re.search(r"__version__ = '([^+']+)", (torch / "version.py").read_text())
    if not found:
        sys.exit(f"error: cannot read torch's version from {torch / 'version.py'}")
    return found.group(1)


def requirement(releases: list[str]) -> str:
    """Exactly these torch releases: the other ones between the first and the last are excluded."""
    if len(releases) == 1:
        return f"torch=={releases[0]}"
    built = sorted(tuple(map(int, release.split("."))) for release in releases)
    (major, first, _), (_, last, _) = built[0], built[-1]
    # Patch releases up to .3: torch 2 has had none after .2.
    between = [(major, minor, patch) for minor in range(first, last + 1) for patch in range(4)]
    others = [version for version in between if built[0] < version < built[-1]]
    bounds = [(">=", built[0]), ("<=", built[-1])]
    bounds += [("!=", version) for version in others if version not in built]
    return "torch" + ",".join(sign + ".".join(map(str, version)) for sign, version in bounds)


def forget_tools_that_are_gone(build: Path) -> None:
    """pip builds with a ninja in a folder that it then removes; CMake's cache goes on naming it."""
    cache = build / "CMakeCache.txt"
    if cache.exists():
        for line in cache.read_text().splitlines():
            if line.startswith("CMAKE_MAKE_PROGRAM:") and not Path(line.split("=", 1)[1]).exists():
                cache.unlink()
                return


class CMakeBuild(build_ext):
    def run(self) -> None:
        """Builds for a wheel, or into the source tree, from which an editable install runs."""
        package = (ROOT / "python" if self.inplace else Path(self.build_lib).resolve()) / "ebb"
        for torch in torch_folders():
            self.build_for(torch, package / "_native" / f"torch-{release_of(torch)}")

    def build_for(self, torch: Path, folder: Path) -> None:
        build = Path(os.environ.get("EBB_BUILD_DIR", ROOT / "build" / f"cmake-{release_of(torch)}"))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DEBB_TORCH_DIR={torch}",
            f"-DEBB_PYTHON_INCLUDE_DIR={sysconfig.get_path('include')}",
            f"-DEBB_MODULE_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            f"-DEBB_RELOCATABLE={'OFF' if self.inplace else 'ON'}",
            f"-DEBB_CUDA={os.environ.get('EBB_CUDA', 'auto')}",
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


class CleanBuild(build):
    def run(self) -> None:
        """What earlier builds left would be packed too: modules that are not there any more."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("ebb._C", [])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    install_requires=[requirement([release_of(torch) for torch in torch_folders()])],
)
