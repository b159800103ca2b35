"""Records steps: operators, memory, durations, and the speed of copies."""
