"""Selects a choice for each region, within a memory budget."""
