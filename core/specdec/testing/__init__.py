"""Helpers for people who test targets, drafters and rounds. Shipped with the core so that plugins can use them."""

from specdec.testing.guard import CapturableGuard, NotCapturable

__all__ = ["CapturableGuard", "NotCapturable"]
