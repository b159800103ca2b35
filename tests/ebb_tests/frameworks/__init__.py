"""For the tests in `integration`: frameworks with and without ebb."""
