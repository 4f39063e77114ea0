"""Requests that continue held-out texts with the small checkpoint's own sampling defaults."""

from __future__ import annotations

from pathlib import Path

from specdec.serving.model import LoadedModel
from specdec.serving.request import Request

FOLDER = Path(__file__).parents[1] / "benchmarks" / "heldout"


def heldout_requests(model: LoadedModel, *, files: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """The first tokens of ``files`` texts as prompts; after the last text comes the first again. Request i has seed i."""
    requests = []
    texts = sorted(FOLDER.glob("*.txt"))
    for seed in range(files):
        path = texts[seed % len(texts)]
        prompt = model.tokenizer.encode(path.read_text(encoding="utf-8"))[:prompt_tokens]
        requests.append(
            Request(
                prompt=tuple(prompt),
                sampling=model.defaults.sampling(seed=seed),
                max_new_tokens=new_tokens,
            )
        )
    return requests
