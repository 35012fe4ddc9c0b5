"""This machine as a platform."""
