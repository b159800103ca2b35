"""What the environment's variables say, and what is taken over in a job because of them."""
