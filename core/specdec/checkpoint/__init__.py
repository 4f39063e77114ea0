"""Reading and writing checkpoints: safetensors directories, storage formats, tokenizer, header inspection.

``header``, ``reader``, ``storages`` and ``inspect`` work on headers and import no torch; ``nvfp4``, ``csf``, ``matrices``,
``mixtures``, ``weights`` and ``writer`` handle tensors and are imported by name. Only :class:`Checkpoint` is offered here.
"""

from specdec.checkpoint.reader import Checkpoint, Validation

__all__ = ["Checkpoint", "Validation"]
