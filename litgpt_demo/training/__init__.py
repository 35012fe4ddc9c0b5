"""The trainer, room by room; `litgpt_demo.training.loop` runs it in every rank."""
