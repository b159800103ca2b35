"""Mutation tests: ``PYTHONPATH=tests python -m mutants``."""
