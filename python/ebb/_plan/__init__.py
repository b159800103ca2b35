"""Makes plans: which activations each region saves, recomputes, offloads or pages."""
