"""Regions, in which ops are intercepted: entering them, and marking tensors inside them."""
