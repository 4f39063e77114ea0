"""Tensor operators shared by model plugins: plain torch, capturable, no host synchronisation.

An operator takes tensors and numbers, returns tensors and never keeps one. It moves here when a second plugin needs it.
Import the module you need (``from specdec.ops.norms import rms``); this package imports nothing by itself, so that the
declaration layer may name it without loading torch.
"""
