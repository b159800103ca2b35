"""Calls of torch's operators, by operator: arguments, and comparisons with eager."""
