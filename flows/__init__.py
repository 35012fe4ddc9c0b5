"""The order of the stages, as Prefect's flows."""
