"""Slurm: one batch job per attempt, by the commands that every cluster has, here or on a login node through ssh."""
