"""Scheduling without torch: which request runs when, in which shape; the same code drives a loaded model and a simulated device.

device.py      what a scheduler drives
resident.py    one admitted request, as the host knows it
scheduler.py   admission, prompt chunks, rounds in flight, preemption, ends
"""
