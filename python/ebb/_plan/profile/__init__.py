"""What a step did: its operators, memory and durations, and the speed of copies."""
