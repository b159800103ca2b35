"""Helpers for all other rooms, without imports of them: messages, sizes, names, the job."""
