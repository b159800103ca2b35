"""What ebb did: counters, and reports of a step as text, picture, page and file."""
