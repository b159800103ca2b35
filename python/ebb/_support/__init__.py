"""Helpers that all other folders use and that import none of them: messages, sizes, names."""
