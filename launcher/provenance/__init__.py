"""Documents of a finished run that others can check: provenance, test results, bill, metadata of data, summary."""
