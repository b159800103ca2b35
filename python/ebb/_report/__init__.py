"""Counters, and reports of a step as text, picture, page and file."""
