"""Runs and their attempts: the index, sweeps, waiting, and the diagnosis of failures."""
