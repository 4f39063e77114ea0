"""Requests whose laws a kernel is compared on: every filter alone and together, and off values."""

from typing import Any

REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.6},
    {"min_p": 0.05, "top_k": 3},
    {"greedy": True, "min_p": 0.2},
    {"top_k": 5000, "top_p": 0.3},
    {"top_k": 1},
    {"top_p": 1e-6},
]
