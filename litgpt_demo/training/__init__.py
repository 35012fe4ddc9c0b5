"""The trainer, room by room; `litgpt_demo.train` runs it in every rank."""
