"""C++ projects: find_package(ebb), with and without torch's package, and its errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")


@pytest.fixture(scope="module")
def package():
    run = [sys.executable, "-m", "ebb", "--cmake-dir"]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def configure(source, build, *options):
    return subprocess.run(
        ["cmake", "-S", str(source), "-B", str(build), *options], capture_output=True, text=True
    )


@pytest.mark.sweep
def test_the_example_trains_and_is_exact(package, tmp_path):
    done = configure(ROOT / "examples/cpp", tmp_path, f"-Debb_DIR={package}")
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)

    result = subprocess.run([str(tmp_path / "train_mlp")], capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("gradients identical: yes") == 5
    assert "aten::addmm.default: saved by rule 0, 'aten::addmm'" in result.stdout
    assert "objects left: none" in result.stdout


PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES CXX)
{before}
find_package(ebb {version} REQUIRED)
add_executable(user user.cpp)
target_link_libraries(user PRIVATE ebb::ebb)
"""
# What torch's own package defines.
TORCH_TARGETS = f"""
add_library(torch INTERFACE IMPORTED)
set(TORCH_INCLUDE_DIRS {TORCH}/include {TORCH}/include/torch/csrc/api/include)
set(TORCH_LIBRARIES {TORCH}/lib/libtorch.so {TORCH}/lib/libtorch_cpu.so {TORCH}/lib/libc10.so)
include_directories(${{TORCH_INCLUDE_DIRS}})
"""
PROGRAM = """
#include <ebb/ebb.h>
int main() {
  ebb::Region region(ebb::saveMatmuls());
  return ebb::stats().openRegions == 1 ? 0 : 1;
}
"""


def project(folder, before="", version=""):
    (folder / "CMakeLists.txt").write_text(PROJECT.format(before=before, version=version))
    (folder / "user.cpp").write_text(PROGRAM)
    return folder


@pytest.mark.sweep
def test_after_find_package_torch(package, tmp_path):
    source = project(tmp_path, TORCH_TARGETS, "0.2")
    done = configure(source, tmp_path / "build", f"-Debb_DIR={package}")
    assert done.returncode == 0, done.stderr
    build = ["cmake", "--build", str(tmp_path / "build")]
    subprocess.run(build, check=True, capture_output=True)
    assert subprocess.run([str(tmp_path / "build" / "user")]).returncode == 0


def test_a_later_ebb_is_not_found(package, tmp_path):
    done = configure(project(tmp_path, version="9.0"), tmp_path / "b", f"-Debb_DIR={package}")
    assert done.returncode != 0
    assert "0.2.0" in done.stderr


def test_no_torch(package, tmp_path):
    options = (f"-Debb_DIR={package}", "-DEBB_TORCH_DIR=/nowhere")
    done = configure(project(tmp_path), tmp_path / "b", *options)
    assert done.returncode != 0
    assert "EBB_TORCH_DIR='/nowhere' is no torch" in " ".join(done.stderr.split())


def test_another_torch(package, tmp_path):
    header = tmp_path / "torch/include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 1\n")
    api = tmp_path / "torch/include/torch/csrc/api/include/torch/torch.h"
    api.parent.mkdir(parents=True)
    api.write_text("")
    options = (f"-Debb_DIR={package}", f"-DEBB_TORCH_DIR={tmp_path / 'torch'}")
    done = configure(project(tmp_path), tmp_path / "b", *options)
    assert done.returncode != 0
    assert "this project uses 2.1. Build ebb with that torch" in " ".join(done.stderr.split())


@pytest.mark.sweep
def test_a_library_for_a_libtorch_archive(tmp_path):
    """Such a folder has no version.py; the package is laid out for a prefix."""
    archive = tmp_path / "libtorch"
    archive.mkdir()
    for name in ("include", "lib"):
        (archive / name).symlink_to(TORCH / name)
    release = torch.__version__.split("+")[0]
    (archive / "build-version").write_text(torch.__version__ + "\n")
    done = configure(ROOT, tmp_path / "b", f"-DEBB_TORCH_DIR={archive}")
    assert done.returncode == 0, done.stderr
    assert f"ebb: torch {release} in {archive}" in done.stdout
    config = (tmp_path / "b" / "ebbConfig.cmake").read_text()
    assert "${_ebb_here}/../../libebb.so" in config
    bare = configure(ROOT, tmp_path / "c", f"-DEBB_TORCH_DIR={tmp_path}")
    assert bare.returncode != 0
    assert "holds no version.py or build-version" in " ".join(bare.stderr.split())
