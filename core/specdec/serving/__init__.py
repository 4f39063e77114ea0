"""Requests, the loaded model and the generation loop. ``request``, ``statistics`` and ``metrics`` are torch-free."""
