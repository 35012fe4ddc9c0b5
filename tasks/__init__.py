"""The pipeline's steps as Prefect tasks: thin edges around launcher and litgpt_demo."""
