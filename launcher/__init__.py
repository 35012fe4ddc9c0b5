"""Jobs, platforms and everything else that is neither Prefect nor needed on a node."""
