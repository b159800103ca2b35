"""Code that the tests of ebb share."""

from pathlib import Path

TESTS = Path(__file__).parents[1]  # the folder that makes this package importable
