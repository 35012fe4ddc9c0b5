"""Jobs, platforms and everything else that is neither Prefect nor needed on a node."""

DEFAULT_ROOT = "output"  # of configs and commands that name none
