"""Programs and models for tests, and what a test does with one of them."""
