"""The build from source: without a compiler, the commit, what a source distribution has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
from native_build import check_compiler, commit_of  # noqa: E402

MESSAGE = "error: ebb needs a C++20 compiler to build from source, and "


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is all of PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "EBB_CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def add_program(folder, name):
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o700)


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_each_compiler_that_cmake_finds_is_found(tools, name):
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler is on the path"):
        check_compiler()
    add_program(tools, name)
    check_compiler()


def test_named_compiler_must_exist(tools, monkeypatch):
    add_program(tools, "c++")
    monkeypatch.setenv("CXX", "g++-99 -m64")
    with pytest.raises(SystemExit, match=r"CXX=g\+\+-99 does not exist"):
        check_compiler()
    add_program(tools, "g++-99")
    check_compiler()


@pytest.mark.parametrize("argument", ["CMAKE_CXX_COMPILER=/x/g++", "CMAKE_TOOLCHAIN_FILE=/x"])
def test_arguments_for_cmake_may_name_the_compiler(tools, monkeypatch, argument):
    monkeypatch.setenv("EBB_CMAKE_ARGS", f"-D{argument}")
    check_compiler()


def test_output_of_pip_ends_with_what_to_do(tools):
    """pip adds where its own output ends, and that the error is not its own."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", tools.parent / "wheels", ROOT]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode != 0
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    (at,) = [number for number, line in enumerate(lines) if MESSAGE in line]
    assert lines[at].endswith("or install a wheel of torch-ebb, which needs no compiler.")
    assert "end of output" in lines[at + 1]
    assert not any("CMake" in line or "Traceback" in line for line in lines)


def git(folder, *command):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_commit_of_a_checkout(tmp_path):
    assert commit_of(tmp_path) == "unknown"
    git(tmp_path, "init")
    assert commit_of(tmp_path) == "unknown"  # no commit yet
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == commit[:12]

    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit[:12]}-dirty"
    unpacked = tmp_path / "torch_ebb-1.0"
    unpacked.mkdir()
    assert commit_of(unpacked) == "unknown"  # inside of a checkout of something else


def test_commit_is_unknown_without_git(tools):
    assert commit_of(ROOT) == "unknown"


def test_source_distribution_has_what_a_build_needs(tmp_path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(
        ".git", "build", ".venv*", "_native", "__pycache__", "*.egg-info", "tests", "benchmarks"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path],
        cwd=copy,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        check=True,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = ["CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"]
    for folder in ("cmake", "include", "src"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        needed += [str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"]
    assert [name for name in needed if name not in names] == []
