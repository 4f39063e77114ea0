"""Training of the plugins' small checkpoints: what every architecture shares.  Not packaged, not imported at run time.

    corpus.py        builds the text, the tokenizer and the token files
    data.py          token files on the training device
    blocks.py        differentiable blocks that several architectures use
    selector.py      selection by compressed groups, and the selector's loss
    sinkhorn.py      doubly stochastic mixing matrices
    model.py         what the trainer and the evaluation expect of a model
    objectives.py    losses and acceptance measures
    optimiser.py     Muon and AdamW
    storage.py       the project's storage formulas (NVFP4, CSF)
    quantisation.py  stored values of expert stacks
    state.py         resumable weight files, archives
    evaluation.py    held-out measures
    card.py          the checkpoint's card
    directory.py     writes a checkpoint directory
    architecture.py  what a plugin hands to the command
    trainer.py       model, optimisers and steps of one run
    command.py       phases, budget, resume: the training command of every plugin

A plugin's own part lies in ``plugins/NAME/training`` and hands :func:`training.command.main` an ``Architecture``.
"""
