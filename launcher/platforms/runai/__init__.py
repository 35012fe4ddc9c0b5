"""Run:ai: its settings, its command line in two generations, its REST API."""
