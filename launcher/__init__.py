"""Jobs, platforms and everything else that is neither Prefect nor needed on a node."""

DEFAULT_ROOT = "output"
"""The root of a config that names none, and of commands."""
