"""Slurm: what jobs become there, and what comes back."""
