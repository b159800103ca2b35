"""Written by setup.py."""

TORCH_RELEASE = "2.13.0"
