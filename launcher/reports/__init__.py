"""Pages, charts and tables that a run leaves for people."""
