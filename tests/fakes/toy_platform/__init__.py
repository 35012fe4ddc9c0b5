"""A platform that is one folder and one line of the registry: what it takes to add one, shown and tried."""
