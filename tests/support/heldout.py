"""Requests that continue held-out texts with the small checkpoint's own sampling defaults."""

from __future__ import annotations

from pathlib import Path

from specdec.serving.model import LoadedModel
from specdec.serving.request import Request

FOLDER = Path(__file__).parents[1] / "benchmarks" / "heldout"


def heldout_requests(model: LoadedModel, *, files: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """The first tokens of the first ``files`` texts as prompts; request i has seed i."""
    requests = []
    for seed, path in enumerate(sorted(FOLDER.glob("*.txt"))[:files]):
        prompt = model.tokenizer.encode(path.read_text(encoding="utf-8"))[:prompt_tokens]
        requests.append(
            Request(
                prompt=tuple(prompt),
                sampling=model.defaults.sampling(seed=seed),
                max_new_tokens=new_tokens,
            )
        )
    return requests
