"""Finds each torch to build for; pyproject.toml has everything else, cmake/ the build itself."""

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "cmake"))
from native_build import CleanBuild, CMakeBuild, check_compiler


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


check_compiler()
CMakeBuild.releases = {release_of(folder): folder for folder in torch_folders()}
setup(
    ext_modules=[Extension("ebb._C", [])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    install_requires=[requirement(list(CMakeBuild.releases))],
)
