"""Builds the C++ part with CMake; everything else is in pyproject.toml."""

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

ROOT = Path(__file__).parent
TEST_MODULE = f"_testing{sysconfig.get_config_var('EXT_SUFFIX')}"  # built where EBB_TESTING is 1


def torch_dir() -> Path:
    """The torch that will be used, found without importing it: a build in isolation cannot."""
    override = os.environ.get("EBB_TORCH_DIR")
    if override:
        return Path(override)
    for key in ("platlib", "purelib"):
        candidate = Path(sysconfig.get_path(key)) / "torch"
        if (candidate / "version.py").exists():
            return candidate
    sys.exit(
        "error: ebb is built against the torch that it will run with, and none is installed in "
        f"{sysconfig.get_path('platlib')}.\nInstall it first: pip install torch==2.13.0\n"
        "or name the package's folder in EBB_TORCH_DIR."
    )


def torch_release(torch: Path) -> str:
    found = re.search(r"__version__ = '([0-9.]+)", (torch / "version.py").read_text())
    if not found:
        sys.exit(f"error: cannot read torch's version from {torch / 'version.py'}")
    return found.group(1)


def forget_tools_that_are_gone(build: Path) -> None:
    """pip builds with a ninja in a folder that it then removes; CMake's cache goes on naming it."""
    cache = build / "CMakeCache.txt"
    if cache.exists():
        for line in cache.read_text().splitlines():
            if line.startswith("CMAKE_MAKE_PROGRAM:") and not Path(line.split("=", 1)[1]).exists():
                cache.unlink()
                return


class CMakeBuild(build_ext):
    def copy_extensions_to_source(self) -> None:
        """An editable install runs from the source tree: libebb and the build info go there too."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "ebb"
        package = ROOT / "python" / "ebb"
        for name in ("libebb.so", "_build_info.py"):
            self.copy_file(str(built / name), str(package / name))
        if (built / "libebb_cuda.so").exists():
            self.copy_file(str(built / "libebb_cuda.so"), str(package / "libebb_cuda.so"))
        # The one of an earlier build fits that build's libebb only.
        if (built / TEST_MODULE).exists():
            self.copy_file(str(built / TEST_MODULE), str(package / TEST_MODULE))
        else:
            (package / TEST_MODULE).unlink(missing_ok=True)
        for name in ("include", "cmake"):
            self.copy_tree(str(built / name), str(package / name))

    def build_extension(self, ext: Extension) -> None:
        torch = torch_dir()
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        package.mkdir(parents=True, exist_ok=True)
        build = Path(
            os.environ.get("EBB_BUILD_DIR", ROOT / "build" / f"cmake-{torch_release(torch)}")
        )
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DEBB_TORCH_DIR={torch}",
            f"-DEBB_PYTHON_INCLUDE_DIR={sysconfig.get_path('include')}",
            f"-DEBB_MODULE_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}",
            f"-DCMAKE_INSTALL_PREFIX={package}",
            f"-DEBB_CUDA={os.environ.get('EBB_CUDA', 'auto')}",
            f"-DEBB_SANITIZE={os.environ.get('EBB_SANITIZE', '')}",
            f"-DEBB_TESTING={os.environ.get('EBB_TESTING', '0')}",
            *os.environ.get("EBB_CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        forget_tools_that_are_gone(build)
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        (package / TEST_MODULE).unlink(missing_ok=True)
        subprocess.run(["cmake", "--install", str(build)], check=True)
        info = f'"""Written by setup.py."""\n\nTORCH_RELEASE = "{torch_release(torch)}"\n'
        (package / "_build_info.py").write_text(info)


class CleanBuild(build):
    def run(self) -> None:
        """What earlier builds left would be packed too: modules that are not there any more."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("ebb._C", [])], cmdclass={"build": CleanBuild, "build_ext": CMakeBuild}
)
