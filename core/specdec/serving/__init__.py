"""Requests, the loaded model and the generation loop. ``request`` and ``statistics`` are torch-free."""
