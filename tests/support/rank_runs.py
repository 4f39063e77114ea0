"""Two processes over gloo that run the same requests, each with its own fault, and write down what they saw."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from attrs import evolve, frozen

from specdec.errors import DesynchronisationError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.ranks import RankAgreement
from specdec.serving.request import Emission, Request
from specdec.testing.conformance import replaced

WORLD = 2
#: Runs with noise of each size on the logits of rank 1: one that the float32 law hardly sees, one that decides some draws, one
#: that decides many.
NOISES = {1e-7: 16, 1e-2: 12, 1.0: 8}
#: A rank waits this long for the other: long enough for a busy machine, short enough for a test.
TIMEOUT, SHORT_TIMEOUT = timedelta(seconds=60), timedelta(seconds=3)


@frozen(kw_only=True)
class Run:
    """One run of one rank. emitted: (request, tokens, finish, accepted) by round; error: its message, None if it ended well.
    again: the message of the step after that."""

    emitted: dict[int, list[tuple[int, tuple[int, ...], str, int]]]
    error: str | None = None
    again: str | None = None

    @property
    def tokens(self) -> dict[int, list[int]]:
        """All tokens by request."""
        found: dict[int, list[int]] = {}
        for emissions in self.emitted.values():
            for request, tokens, *_ in emissions:
                found.setdefault(request, []).extend(tokens)
        return found


def requests(seed: int, count: int = 4) -> list[Request]:
    """Requests at temperature one; more than run at once."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            prompt=torch.randint(0, 6, (3 + 2 * number,), generator=generator).tolist(),
            max_new_tokens=10 + number,
            stop_ids=(),
            sampling=SamplingParams(temperature=1.0, seed=100 * seed + number),
        )
        for number in range(count)
    ]


def load(directory: Path) -> LoadedModel:
    """Float32, three requests at once, prefix checkpoints."""
    recipe = recipe_book().recipe("qwen3.8-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=3, context=100, prefill_tokens=(16,), snapshot_bytes=1 << 20, adaptive_verification=False
    )
    return LoadedModel.prepare(recipe, config, directory=directory, dtype="float32")


@contextmanager
def noisy(model: LoadedModel, size: float, seed: int) -> Iterator[None]:
    """Normal noise on all target logits, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def with_noise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def changed(*arguments: Any) -> torch.Tensor:
            logits = function(*arguments)
            return logits + size * torch.randn(logits.shape, generator=generator)

        return changed

    target = model.target
    with (
        replaced(target, "verify", with_noise(target.verify)),
        replaced(target, "first_logits", with_noise(target.first_logits)),
    ):
        yield


def run(
    model: LoadedModel,
    wanted: list[Request],
    ranks: RankAgreement | None = None,
    after: Callable[[Generator, int], object] = lambda generator, rounds: None,
) -> Run:
    """Runs requests to their ends or to the error, and then cancels what is left. after: called after every step."""
    generator = Generator(model, width=5, prefix_cache=prefix_cache(model), ranks=ranks)
    for request in wanted:
        generator.submit(request)
    emitted: dict[int, list[tuple[int, tuple[int, ...], str, int]]] = {}
    errors: list[str] = []
    rounds = 0
    while (generator._waiting or generator._residents) and len(errors) < 2:
        try:
            for event in generator.step():
                if isinstance(event, Emission):
                    emitted.setdefault(event.completion.round, []).append(
                        (event.request, event.tokens, event.finish.name, event.completion.accepted)
                    )
            after(generator, rounds)
            rounds += 1
        except DesynchronisationError as error:
            errors.append(str(error))
    for number in range(len(wanted)):
        generator.cancel(number)
    generator._prefixes.cache.clear()
    return Run(emitted=emitted, error=errors[0] if errors else None, again=errors[1] if errors[1:] else None)


def scenarios(model: LoadedModel, rank: int, folder: Path) -> Iterator[tuple[Any, Run]]:
    """Every run by key; with ("alone", …) the same run of this rank without the other."""

    def agreement() -> RankAgreement:
        return RankAgreement(dist.group.WORLD)

    yield "same", run(model, requests(0), agreement())
    for size, count in NOISES.items():
        for seed in range(count):
            for alone in (True, False):
                with noisy(model, size if rank == 1 else 0.0, seed):
                    found = run(model, requests(seed), None if alone else agreement())
                yield (("alone", size, seed) if alone else (size, seed)), found
    for seed in range(4):
        other = [evolve(r, sampling=evolve(r.sampling, seed=r.sampling.seed + rank)) for r in requests(seed)]
        yield ("alone", "seed", seed), run(model, other)
        yield ("seed", seed), run(model, other, agreement())
    yield "fewer", run(model, requests(0, count=3 - rank), agreement())
    stops = [evolve(r, stop_ids=(0, 1, 2, 3, 4, 5) if rank else ()) for r in requests(0, count=1)]
    yield "stops", run(model, stops, agreement())

    def cancel(generator: Generator, rounds: int) -> None:
        if rank == 1 and rounds == 1:
            generator.cancel(2)

    yield "cancelled", run(model, requests(0, count=3), agreement(), cancel)

    # last, because a group is of no use after a timeout
    group = dist.new_group(backend="gloo", timeout=SHORT_TIMEOUT)
    done = folder / "done"
    if rank == 0:
        started = time.monotonic()
        found = run(model, requests(0), RankAgreement(group))
        assert time.monotonic() - started < 10 * SHORT_TIMEOUT.total_seconds()
        done.touch()
        yield "departed", found
    else:
        while not done.exists():
            time.sleep(0.05)


def _rank(rank: int, directory: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # the global generator must not matter
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    found = dict(scenarios(load(directory), rank, folder))
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))


def run_ranks(directory: Path, folder: Path, limit: float = 150.0) -> list[dict[Any, Run]]:
    """Runs all scenarios on both ranks: what each saw. directory: checkpoint; folder: an empty one for their files.

    Raises TimeoutError if they hang, after ending them, and what a rank raised if it failed.
    """
    context = torch.multiprocessing.start_processes(
        _rank, args=(directory, folder), nprocs=WORLD, join=False, start_method="spawn"
    )
    ends = time.monotonic() + limit
    try:
        while not context.join(timeout=max(ends - time.monotonic(), 0.0)):
            if time.monotonic() > ends:
                raise TimeoutError(f"the ranks did not end within {limit} s")
    finally:
        for process in context.processes:
            process.kill()
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(WORLD)]
