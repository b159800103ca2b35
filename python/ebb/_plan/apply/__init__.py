"""Policies of a plan's modules, and descriptions of plans."""
