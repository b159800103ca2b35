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
    """Configures; gives the status and what CMake told, without its line breaks."""
    command = ["cmake", "-S", source, "-B", build, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def build(folder):
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)


@pytest.mark.sweep
def test_example_trains_and_is_exact(package, tmp_path):
    status, told = configure(ROOT / "examples/cpp", tmp_path, f"-Debb_DIR={package}")
    assert status == 0, told
    build(tmp_path)

    result = subprocess.run([tmp_path / "train_mlp"], capture_output=True, text=True)

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
def test_project_that_also_finds_torchs_package(package, tmp_path):
    source = project(tmp_path, TORCH_TARGETS, "0.2")
    status, told = configure(source, tmp_path / "build", f"-Debb_DIR={package}")
    assert status == 0, told
    build(tmp_path / "build")
    assert subprocess.run([tmp_path / "build/user"]).returncode == 0


@pytest.mark.parametrize(
    ("version", "torch_folder", "error"),
    [
        ("9.0", TORCH, "0.2.0"),
        ("", "/nowhere", "EBB_TORCH_DIR='/nowhere' is no torch"),
        ("", "torch", "this project uses 2.1. Build ebb with that torch"),
    ],
    ids=["later ebb", "no torch", "another torch"],
)
def test_error_of_find_package(package, tmp_path, version, torch_folder, error):
    header = tmp_path / "torch/include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 1\n")
    api = tmp_path / "torch/include/torch/csrc/api/include/torch/torch.h"
    api.parent.mkdir(parents=True)
    api.touch()
    options = (f"-Debb_DIR={package}", f"-DEBB_TORCH_DIR={tmp_path / torch_folder}")

    status, told = configure(project(tmp_path, version=version), tmp_path / "build", *options)

    assert status != 0
    assert error in told


@pytest.mark.sweep
def test_library_for_a_libtorch_archive(tmp_path):
    """Such a folder has no version.py; the package is laid out for a prefix."""
    archive = tmp_path / "libtorch"
    archive.mkdir()
    for name in ("include", "lib"):
        (archive / name).symlink_to(TORCH / name)
    release = torch.__version__.split("+")[0]
    (archive / "build-version").write_text(torch.__version__ + "\n")
    status, told = configure(ROOT, tmp_path / "b", f"-DEBB_TORCH_DIR={archive}")
    assert status == 0, told
    assert f"ebb: torch {release} in {archive}" in told
    config = (tmp_path / "b/ebbConfig.cmake").read_text()
    assert "${_ebb_here}/../../libebb.so" in config
    status, told = configure(ROOT, tmp_path / "c", f"-DEBB_TORCH_DIR={tmp_path}")
    assert status != 0
    assert "holds no version.py or build-version" in told
