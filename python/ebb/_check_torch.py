"""Compares the running torch with the one that ebb was built against."""

from __future__ import annotations


def release(version: str) -> str:
    """The public part of a version: CPU and CUDA builds of one release are compatible."""
    return version.split("+")[0]


def check(built: str | None, running: str) -> None:
    """Raise ImportError if the releases differ, before the dynamic linker can fail.

    Args:
        built: the torch release that ebb was built against; None if ebb was never built.
        running: ``torch.__version__``.
    """
    if built is None:
        raise ImportError(
            "ebb's C++ part is not built. Likely causes: 1. ebb is imported from a source checkout "
            "(run `pip install --no-build-isolation -e .` there); 2. the installation was "
            "interrupted (run `pip install --force-reinstall --no-deps torch-ebb`)."
        )
    if release(running) != built:
        raise ImportError(
            f"ebb was built against torch {built}, but torch {running} is running. Likely causes: "
            "1. torch was upgraded after ebb was installed; 2. another environment's torch comes "
            "first on sys.path; 3. a prebuilt ebb was copied here. Rebuild ebb for this torch: "
            "pip install --force-reinstall --no-deps --no-cache-dir torch-ebb "
            "(in a checkout: pip install --no-build-isolation -e .)"
        )
