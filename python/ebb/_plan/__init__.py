"""Planning what is kept."""
