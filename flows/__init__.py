"""The order of the steps, and the command line."""
