"""The command line: its commands, tables and progress bars."""
