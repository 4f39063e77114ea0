"""Qwen3.8-Flash-Next for specdec: the target and the MTP drafter embedded in its checkpoint. Importing this loads nothing."""
