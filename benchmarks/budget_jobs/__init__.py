"""Training jobs written without regard to ebb, for `budgets_in_jobs.py`."""
