"""What the host learns from finished rounds and decides before the next. Torch-free.

acceptance.py     how often drafts survive, of all requests and of one
cost.py           seconds of a round by its shape
exploration.py    the budget for rounds other than the best known
controller.py     the width of the next round
trace.py          what was known, chosen and got, round by round, and its replay
calibration.py    temperatures of a drafter's forecasts
"""
