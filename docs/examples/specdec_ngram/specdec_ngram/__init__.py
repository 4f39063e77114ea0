"""Prompt lookup for specdec: drafts are what followed the same tokens before. Importing this loads nothing."""
