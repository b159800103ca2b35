"""Reads ebb's environment variables, and takes over checkpoint calls and modules of a job."""
