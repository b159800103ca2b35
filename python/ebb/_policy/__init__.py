"""Rules and policies, which give operators a decision; their text form; conversion for torch."""
