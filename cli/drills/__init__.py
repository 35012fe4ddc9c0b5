"""Drills: a small training is disturbed on purpose, taken up as a user would, and compared with one left in peace.

ground.py    a folder, a Prefect server and real commands; what they and their job show from outside
table.py     the drills: what is injected and when, and what the user has to be told
judging.py   what was promised, held against what became of the run
"""
