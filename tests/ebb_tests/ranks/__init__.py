"""Programs on several ranks."""
