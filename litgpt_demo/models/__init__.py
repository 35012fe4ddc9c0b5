"""LitGPT models by name, what they cost, and what devices can do."""
