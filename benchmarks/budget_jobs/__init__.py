"""Jobs that know nothing of a budget, for `budgets_in_jobs.py`."""
