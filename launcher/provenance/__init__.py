"""What a finished run states about itself, for others to check: provenance, results, bill, data and summary."""
