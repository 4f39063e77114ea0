"""``specdec simulate``: width policies over declared costs and acceptance, on the same arrivals and the same luck.

Loads no model and never imports torch. The table goes to stdout, what was simulated to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.output import clear_progress, progress, say, write
from specdec.cli.refusals import names_options
from specdec.cli.tables import columns, json_text
from specdec.errors import ExitCode, PluginError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.simulation.policies import NamedPolicy
    from specdec.simulation.profiles import Profile, ProfileBook, SourcedCosts, SourcedCurve
    from specdec.simulation.summary import Summary
    from specdec.simulation.workload import Arrival

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Compares width policies on a simulated device: the scheduler and controller of the engine over declared round
costs and acceptance curves. Every policy meets the same requests and the same luck. Times are simulated seconds."""
#: More would hold the table up for hours.
MOST_REQUESTS = 1_000_000
MOST_REPLICAS = 4096
MOST_CONCURRENCY = 4096


def add_parser(subparsers: Any) -> None:
    """Adds ``simulate`` to the command line."""
    parser = subparsers.add_parser("simulate", description=_DESCRIPTION, allow_abbrev=False)
    named = parser.add_mutually_exclusive_group()
    named.add_argument(
        "--profile",
        metavar="NAME",
        help="costs, curves and prepared widths (default: those of the only installed recipe); --list shows them",
    )
    named.add_argument("--recipe", metavar="NAME", help="the profile of a recipe")
    parser.add_argument("--profiles", metavar="FILE", help="profiles of your own, in the format of the shipped ones")
    parser.add_argument("--list", action="store_true", help="list profiles and the source of every number, then leave")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help="adaptive, plain, or fixed:W with a verification width W; repeatable (default: plain, the widest, adaptive)",
    )
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate", type=float, metavar="R", help="Poisson arrivals per second (default: the profile's for each replica)"
    )
    arrivals.add_argument("--arrivals", metavar="FILE", help="recorded arrivals, JSON lines")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="requests to simulate (default: 500, or all lines of --arrivals)"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="devices behind a dispatcher (default: 1)")
    parser.add_argument(
        "--dispatch",
        choices=("round-robin", "least-loaded"),
        default="least-loaded",
        help="which replica a request goes to (default: least-loaded)",
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at once on a device (default: the profile's)"
    )
    parser.add_argument(
        "--queue-depth", type=int, choices=(1, 2), default=2, help="rounds in flight on a device (default: 2)"
    )
    parser.add_argument(
        "--history-drafts",
        action="store_true",
        help="copy drafts from decoded history, for profiles whose curves say how often and how well",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and luck (default: 0)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="write the comparison as an SVG image")


@names_options
def run(args: argparse.Namespace) -> int:
    """Simulates every policy and reports.

    Raises UsageError for an unknown profile or policy, an option out of range, or arrivals or profiles that cannot be used,
    RecipeError or PluginError for a recipe that is unknown or whose profiles cannot be read, and CapacityError for a request
    that does not fit the simulated device.
    """
    from specdec.simulation.policies import named_policy

    book = _book(args)
    if args.list:
        write(_listed(book, args.json))
        for reason in book.unread.values():
            say(f"specdec: left out {reason}")
        return int(ExitCode.OK)
    name = _of_recipe(book, args) if args.recipe is not None else _named(book, args.profile)
    profile = book.profiles[name]
    concurrency = profile.concurrency if args.concurrency is None else args.concurrency
    for option, value, most in (
        ("--requests", args.requests, MOST_REQUESTS),
        ("--replicas", args.replicas, MOST_REPLICAS),
        ("--concurrency", concurrency, MOST_CONCURRENCY),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{option} is {value}; allowed: 1 to {most}")
    if args.history_drafts and not any(category.copies for category in book.categories(profile).values()):
        able = [n for n, p in book.profiles.items() if any(one.copies for one in book.categories(p).values())]
        raise UsageError(
            f"--history-drafts: profile {name!r} has no copies; profiles with some: {', '.join(able) or 'none'}"
        )
    names = args.policy or ["plain", f"fixed:{profile.widths[-1]}", "adaptive"]
    policies = [named_policy(policy, profile.widths) for policy in dict.fromkeys(names)]
    plot = None if args.plot is None else Path(args.plot)
    if plot is not None and (not plot.parent.is_dir() or plot.is_dir()):
        raise UsageError(f"--plot {args.plot!r}: not a file in a folder that exists; name another")
    arrivals = _arrivals(args, book, profile)
    summaries = [_simulated(args, book, profile, concurrency, policy, arrivals) for policy in policies]
    if plot is not None:
        _plot(plot, summaries, name, args.replicas)
    if args.json:
        write(json_text(_data(args, book, profile, name, concurrency, arrivals, summaries)))
        return int(ExitCode.OK)
    write(_table(summaries))
    say(
        f"specdec: simulated {len(arrivals)} requests of profile {name}, {args.replicas} x {concurrency} at once; "
        f"costs are {book.costs[profile.costs].kind} ({book.costs[profile.costs].source})"
    )
    return int(ExitCode.OK)


def _book(args: argparse.Namespace) -> ProfileBook:
    from specdec.simulation.profiles import profiles_of_file, shipped_profiles

    if args.profiles is not None:
        return profiles_of_file(Path(args.profiles))
    from specdec.recipes import recipe_book

    return shipped_profiles(recipe_book().discovery.recipes)


def _of_recipe(book: ProfileBook, args: argparse.Namespace) -> str:
    """Name of the profile that stands for ``--recipe``."""
    found = book.by_recipe.get(args.recipe)
    if found is not None:
        return found
    able = f"recipes with one: {', '.join(book.by_recipe) or 'none'}"
    if args.profiles is not None:
        raise UsageError(f"--recipe {args.recipe!r}: no profile of {args.profiles} stands for it; {able}")
    from specdec.recipes import recipe_book

    place = recipe_book().recipe(args.recipe).profiles
    if place is not None and place in book.unread:
        raise PluginError(f"profiles of recipe {args.recipe!r} cannot be used: {book.unread[place]}")
    raise UsageError(f"--recipe {args.recipe!r} has no profile; {able}")


def _named(book: ProfileBook, asked: str | None) -> str:
    """The name that was asked for, or that of the only profile in question: of a recipe if any stands for one."""
    if asked is not None and asked in book.profiles:
        return asked
    names = f"profiles: {', '.join(book.profiles) or 'none'}"
    left_out = f" (left out: {'; '.join(book.unread.values())})" if book.unread else ""
    if asked is None:
        candidates = list(book.by_recipe.values()) or list(book.profiles)
        if len(candidates) == 1:
            return candidates[0]
        raise UsageError(f"name what to simulate with --profile or --recipe; {names}{left_out}")
    close = difflib.get_close_matches(asked, book.profiles, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else names
    raise UsageError(f"--profile {asked!r} is unknown; {hint}{left_out}")


def _arrivals(args: argparse.Namespace, book: ProfileBook, profile: Profile) -> list[Arrival]:
    from specdec.simulation.workload import poisson, read_arrivals

    if args.arrivals is not None:
        return read_arrivals(Path(args.arrivals), categories=list(profile.mix), most=args.requests)
    return poisson(
        500 if args.requests is None else args.requests,
        profile.rate * args.replicas if args.rate is None else args.rate,
        seed=args.seed,
        mix=profile.mix,
        prompts=profile.prompt,
        outputs=profile.output,
    )


def _simulated(
    args: argparse.Namespace,
    book: ProfileBook,
    profile: Profile,
    concurrency: int,
    policy: NamedPolicy,
    arrivals: Sequence[Arrival],
) -> Summary:
    from specdec.scheduling.scheduler import Scheduler
    from specdec.simulation.device import SimulatedDevice
    from specdec.simulation.fleet import Natures, Replica, simulate
    from specdec.simulation.history import SimulatedHistory
    from specdec.simulation.summary import summarise

    natures = Natures(arrivals, book.categories(profile), args.seed)

    def replica() -> Replica:
        device = SimulatedDevice(
            book.costs[profile.costs].model,
            natures,
            concurrency=concurrency,
            widths=profile.widths,
            token_capacity=profile.token_capacity,
            context=profile.context,
            prefill_tokens=profile.prefill_tokens,
            plain=policy.plain,
        )
        history = SimulatedHistory() if args.history_drafts and not policy.plain else None
        scheduler = Scheduler(device, policy.make(), queue_depth=args.queue_depth, chunks_per_step=1, history=history)
        return Replica(device=device, scheduler=scheduler, history=history)

    def report(dispatched: int) -> None:
        if dispatched % 100 == 0 and sys.stderr is not None and sys.stderr.isatty():
            progress(f"{policy.name}: {dispatched}/{len(arrivals)} requests")

    finished = simulate(arrivals, replica, natures, replicas=args.replicas, dispatch=args.dispatch, report=report)
    clear_progress()
    return summarise(policy.name, finished)


def _plot(path: Path, summaries: Sequence[Summary], name: str, replicas: int) -> None:
    from specdec.simulation.plot import svg

    devices = f"{replicas} replica{'s' if replicas > 1 else ''}"
    try:
        path.write_text(svg(summaries, f"specdec simulate: {name}, {devices}"), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {str(path)!r}: {error.strerror or error}; name another file") from error


def _table(summaries: Sequence[Summary]) -> str:
    head = (
        "policy",
        "tokens/s",
        "TTFT p50/p95/p99 s",
        "latency p50/p95/p99 s",
        "tokens/round",
        "busy",
        "rounds by width",
    )
    return columns(
        [
            head,
            *(
                (
                    one.policy,
                    f"{one.tokens_per_second:.1f}",
                    " / ".join(f"{value:.3f}" for value in one.time_to_first_token.values()),
                    " / ".join(f"{value:.2f}" for value in one.latency.values()),
                    f"{one.tokens_per_round:.2f}",
                    f"{one.busy:.0%}",
                    " ".join(f"{width}:{share:.0%}" for width, share in one.widths.items()) or "-",
                )
                for one in summaries
            ),
        ]
    )


def _data(
    args: argparse.Namespace,
    book: ProfileBook,
    profile: Profile,
    name: str,
    concurrency: int,
    arrivals: Sequence[Arrival],
    summaries: Sequence[Summary],
) -> dict[str, Any]:
    return {
        "profile": name,
        "requests": len(arrivals),
        "replicas": args.replicas,
        "dispatch": args.dispatch,
        "concurrency": concurrency,
        "queue_depth": args.queue_depth,
        "history_drafts": args.history_drafts,
        "seed": args.seed,
        "sources": _sources(book, profile),
        "policies": [one.as_data() for one in summaries],
    }


def _sources(book: ProfileBook, profile: Profile) -> dict[str, Any]:
    """Where the numbers of a profile come from, by the name of its costs and curves."""
    named: dict[str, SourcedCosts | SourcedCurve] = {profile.costs: book.costs[profile.costs]}
    named.update((curve, book.curves[curve]) for curve in profile.mix)
    return {key: {"kind": str(entry.kind), "source": entry.source, "note": entry.note} for key, entry in named.items()}


def _listed(book: ProfileBook, as_json: bool) -> str:
    if as_json:
        return json_text(
            [
                {"name": name, "summary": profile.summary, "recipe": profile.recipe, "sources": _sources(book, profile)}
                for name, profile in book.profiles.items()
            ]
        )
    rows = [(name, profile.recipe or "-", profile.summary) for name, profile in book.profiles.items()]
    parts = [columns([("profile", "recipe", "summary"), *rows])]
    entries: list[tuple[str, SourcedCosts | SourcedCurve]] = [
        (f"costs {name}", one) for name, one in book.costs.items()
    ]
    entries += [(f"curve {name}", one) for name, one in book.curves.items()]
    for title, entry in entries:
        parts += ["", f"{title}: {entry.kind}, {entry.source}", f"  {entry.note}"]
    return "\n".join(parts)
