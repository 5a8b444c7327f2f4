"""Advice on speed: from where workers spend their time it tells what holds a run back,
and what to do about that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.core.clock import PLACES

Kind = Literal["actor", "policy", "trainer", "turns", "other"]
"""``turns``: a process in which workers take turns."""
Verdict = Literal["environment", "inference", "learner", "python", "waits", "balanced"]

WAITS = 0.25
"""From this share of its time on a worker counts as one that waits for others."""
MOST = 0.6
"""From this share of its work on one kind of work is what limits a process that does all
kinds."""


@dataclass(frozen=True)
class WorkerShares:
    """Where the time of one worker, or of several in one process, went: place of `Clock`
    → share."""

    name: str
    kind: Kind
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Advice:
    """What limits the run, and a sentence or two on what to do."""

    verdict: Verdict
    text: str


def advise(workers: Sequence[WorkerShares], elsewhere: bool = False) -> Advice:
    """Return what limits the run. A side that never waits is the bottleneck of one that
    does; `elsewhere` says that the environment steps outside its actor's own thread (in
    threads, of its library or of lanes, or on another machine), so that an actor which
    waits may be waiting for it."""
    if any(w.kind == "turns" for w in workers) and not any(w.kind == "trainer" for w in workers):
        return _advise_turns(_mean(workers, "turns"))
    actor, policy, trainer = (_mean(workers, kind) for kind in ("actor", "policy", "trainer"))
    actors_wait, trainer_waits = actor["wait"], trainer["wait"]
    if trainer_waits < WAITS and actors_wait < WAITS:
        return Advice(
            "balanced",
            f"Balanced: no side waits for the other; all work, {_most(workers)}. More steps/s take more "
            "cores, or less of that work.",
        )
    if trainer_waits < WAITS:
        waits = (
            f"the trainer is at work {1 - trainer_waits:.0%} of the time while actors wait {actors_wait:.0%}"
        )
        if trainer["python"] + trainer["copy"] > trainer["train"]:
            return Advice(
                "python",
                f"Overhead in the trainer: {waits}, but more of it is Python and copying than training. Use "
                "larger samples.",
            )
        return Advice(
            "learner",
            f"Slow learner: {waits}. Use fewer epochs, larger minibatches, a smaller network or bfloat16 "
            "convolutions, or a faster device.",
        )
    idle = f"the trainer waits {trainer_waits:.0%} of the time"
    if any(w.kind == "policy" for w in workers) and policy["wait"] < WAITS:
        return Advice(
            "inference",
            f"Slow inference: {idle}, and the policy workers are at work. Add policy workers, or use a "
            "smaller network.",
        )
    if actors_wait >= WAITS:
        if elsewhere:
            return Advice(
                "environment",
                f"Slow environment: {idle}, and the actors {actors_wait:.0%}, for the environment. Give it "
                "more lanes, threads or cores, or actors of one sample slot a second one (slots=2), to be "
                "filled during updates.",
            )
        return Advice(
            "waits",
            f"Too few lanes or slots: {idle} and the actors {actors_wait:.0%}, each for the other. Use more "
            "lanes, more slots, or a ring of 2.",
        )
    parts: dict[str, float] = {
        "environment": actor["environment"],
        "inference": actor["inference"],
        "python": actor["python"] + actor["copy"],
    }
    most_of = max(parts, key=parts.__getitem__)
    waits = f"{idle}, and the actors spend {parts[most_of]:.0%} of theirs"
    if most_of == "environment":
        return Advice(
            "environment",
            f"Slow environment: {waits} in the environment. Add actors (more than cores, where it sleeps), "
            "or use its native vector form.",
        )
    if most_of == "inference":
        return Advice(
            "inference",
            f"Slow inference: {waits} in the network. Use more lanes (larger batches), more actors, or a "
            "smaller network.",
        )
    return Advice(
        "python",
        f"Overhead in the actors: {waits} with Python and copying. Use more lanes, so that each tick does "
        "more, or more actors.",
    )


def _advise_turns(shares: Mapping[str, float]) -> Advice:
    """Return what limits processes that gather and train by turns: nothing but their
    work, unless they wait."""
    wait = shares["wait"]
    if wait < WAITS:
        most = _most([WorkerShares("", "turns", shares)])
        text = (
            f"every process gathers and trains by turns, {most}. More steps/s take more cores, or less of "
            "that work"
        )
        parts: dict[Verdict, float] = {
            "environment": shares["environment"],
            "inference": shares["inference"],
            "learner": shares["train"],
        }
        verdict = max(parts, key=lambda part: parts[part])
        if parts[verdict] < MOST * (1 - wait):
            return Advice("balanced", f"Balanced: {text}.")
        return Advice(verdict, f"Slow {verdict}: {text}: {_LESS[verdict]}.")
    return Advice(
        "waits",
        f"Waiting: processes that gather and train by turns wait {wait:.0%} of the time, for each other or "
        "for their environments. Let actors and trainers have processes of their own (together = ()), with "
        "more lanes or threads where environments wait.",
    )


def _most(workers: Sequence[WorkerShares]) -> str:
    """Return what most of the work is, in words."""
    work, share = max(
        ((p, sum(w.shares.get(p, 0.0) for w in workers)) for p in PLACES if p != "wait"),
        key=lambda pair: pair[1],
    )
    total = sum(sum(v for p, v in w.shares.items() if p != "wait") for w in workers) or 1.0
    return f"most of it ({share / total:.0%}) with {_WORDS[work]}"


_LESS = {
    "environment": "its native vector form, or a faster environment",
    "inference": "larger batches (more lanes), or a smaller network",
    "learner": "fewer epochs, larger minibatches, a smaller network or bfloat16 convolutions",
}
_WORDS = {
    "environment": "the environment",
    "inference": "inference",
    "train": "training",
    "copy": "copying",
    "python": "Python",
}


def _mean(workers: Sequence[WorkerShares], kind: Kind) -> dict[str, float]:
    shares = [w.shares for w in workers if w.kind == kind]
    return {place: sum(s.get(place, 0.0) for s in shares) / max(len(shares), 1) for place in PLACES}
