"""Sampling: the random stream, the sampling law and chain verification.

    params.py     what a request asks for (torch-free; the command line imports it)
    options.py    which options a request uses, and what refuses them (torch-free)
    philox.py     counter-based random words and uniforms, and the words a round owns
    penalties.py  logits of each row after penalties, bias and minimum length
    law.py        logits to probabilities: temperature, min-p, top-k, top-p, greedy
    chain.py      accept or correct a chain of draft tokens
    sampler.py    the words of a round, and who samples on a device
    flashinfer.py FlashInfer's kernels as a sampler of CUDA devices, imported when one is asked for
    qualification.py  whether a sampler does on a device what the reference does on a CPU
    logprobs.py   log-probabilities of emitted tokens and their frames

This package imports nothing by itself, so that `specdec.sampling.params` stays free of torch.
"""
