"""What a resumed run goes on from: how far it was at its newest good checkpoints, and
which of its limits it has reached."""

import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Self

from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.core.errors import CheckpointError, RunError
from tidemill.core.untrusted_files import read_plain
from tidemill.metrics.json_lines import each_record
from tidemill.run.episode_windows import read_saved_episodes
from tidemill.run.folder import EPISODES, SUMMARY, RunFolder
from tidemill.run.progress import Progress
from tidemill.run.rounds import Rounds
from tidemill.store.checkpoint import (
    ENDED,
    FoundCheckpoint,
    checkpoints,
    read_checkpoint,
    read_newest,
    readable,
)
from tidemill.workers.cut_files import CUTS, RUNNER, actors_with_part, read_part_of
from tidemill.workers.stages import stages_by_round


@dataclass(frozen=True)
class ResumePoint:
    """The newest good checkpoint's name, how far the run was then, and whether an
    iteration or a phase was to be ended then, or training owed."""

    checkpoint: str
    progress: Progress
    unfinished: bool

    @classmethod
    def of(
        cls,
        folder: RunFolder,
        experiment: Experiment,
        policies: Iterable[str] | None = None,
        leads: bool = True,
        cut: Mapping[Path, Path] | None = None,
    ) -> Self:
        """Return that of the run in `folder`, or of those of its policies. Who `leads` it
        renames damaged checkpoints, so that they are never counted again. `cut`: the
        checkpoints that it goes on from, by their folders, where these may not be the
        newest (`newest_whole_cut`)."""
        progress, name, unfinished = Progress(), "", False
        checkpoint_episodes, updates = {}, progress.policy_updates
        with suppress(OSError):  # none: the run was killed early
            checkpoint_episodes = read_saved_episodes(read_plain(folder.path / EPISODES))
        for policy in experiment.trained() if policies is None else policies:
            if not folder.has_checkpoints([policy]):
                raise CheckpointError(
                    f'no checkpoint of policy "{policy}" in {folder.checkpoints(policy)}: the run ended '
                    "before its trainer had written the first one, which it does with its first update, so "
                    "that there is nothing to go on from; train anew (--anew), or in another folder"
                )
            place = folder.checkpoints(policy)
            at = (cut or {}).get(place)
            found = read_newest(place) if at is None else FoundCheckpoint(at, *read_checkpoint(at), [])
            path, _, facts, warnings = found
            if leads:
                newer = checkpoints(path.parent)
                for damaged in newer[newer.index(path) + 1 :]:
                    damaged.rename(damaged.with_name(f"damaged-{damaged.name}"))
                for warning in warnings:
                    print(f"warning: {warning}; going on from {path}", file=sys.stderr)
            try:
                progress.steps = max(progress.steps, int(facts["steps"]))
                updates[policy] = int(facts["updates"])
                progress.updated[policy] = int(facts["steps"]), updates[policy]
                progress.updates = max(progress.updates, updates[policy])
                progress.dropped += int(facts["dropped"])
                progress.changes = max(progress.changes, int(facts.get("changes", 0)))
                progress.seconds = max(progress.seconds, float(facts["seconds"]))
                progress.checkpoint_episodes[policy] = [
                    point for point in checkpoint_episodes.get(policy, ()) if point.updates <= updates[policy]
                ]
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(
                    f"checkpoint {path} does not say how far its run was ({error!r}); it is of another "
                    "version or kind"
                ) from None
            name = path.name
            unfinished = (
                unfinished or "iteration_end" in facts or "finishing" in facts or bool(facts.get("owed"))
            )
        # begun by an update that has its line
        stage = max(
            (point.stage + 1 for points in progress.checkpoint_episodes.values() for point in points),
            default=1,
        )
        with suppress(RunError):  # no metrics: the run ended before its first update
            for record in each_record(folder.path):
                if record.get("step", 0) <= progress.steps and record.get("update", 0) <= progress.updates:
                    progress.episodes = max(progress.episodes, _whole(record.get("episodes", 0)))
                    progress.lost_any |= "lost/steps" in record
                    progress.lost_samples = _whole(record.get("lost/samples", progress.lost_samples))
                    progress.lost_steps = _whole(record.get("lost/steps", progress.lost_steps))
                    stage = max(stage, _whole(record.get("curriculum/stage", 1)))
        progress.stage = max(min(stage, len(experiment.curriculum)), 1) - 1
        if leads and actors_with_part(experiment) and experiment.exact_resume:
            progress.stage, progress.of_cut = 0, True
            progress.rounds = Rounds(experiment) if stages_by_round(experiment) else None
            # else all begins anew; earlier versions wrote it for curricula alone
            if updates and (experiment.curriculum or checkpoints(folder.path / CUTS / RUNNER)):
                progress.load_state(read_part_of(folder.path, RUNNER), updates)
        return cls(name, progress, unfinished)

    def limit_reached(self, folder: Path, limits: Limits, by_all: bool, ended: str) -> str:
        """Return which of `limits` the run, in `folder`, has reached, in words; "" for
        none. Raises `RunError` where it has reached one, unless it `ended` ("killed", …)
        before it could say so. `by_all`: see `each_to_its_limit`."""
        progress = self.progress
        steps, updates = progress.steps, progress.updates
        if by_all:
            steps, updates = map(min, zip(*progress.updated.values(), strict=True))
        for setting, option, done in (
            ("steps", "--max-steps N", steps),
            ("updates", "--max-updates N", updates),
            ("seconds", "--max-seconds N", progress.seconds),
        ):
            limit = getattr(limits, setting)
            if limit is not None and done >= limit and not (setting == "steps" and self.unfinished):
                reached = f"its limit of {limit:,} {setting} ({done:,.0f})"
                if ended:
                    return reached
                raise RunError(
                    f"{folder} has already reached {reached}; go further with a higher one: {option}"
                )
        return ""


def before_torn_end(folder: RunFolder, experiment: Experiment, ended: str) -> dict[Path, Path]:
    """Return what a run goes on from that was killed between the last checkpoints of its
    policies: of one that had reached the run's limit the checkpoint before its last, by
    their folders. {} for all other runs. `ended`: see `ResumePoint.limit_reached`. Raises
    `CheckpointError` where there is none before."""
    policies = experiment.trained()
    if not ended or len(policies) < 2 or experiment.exact_resume or not folder.has_checkpoints(policies):
        return {}
    newest = {policy: read_newest(folder.checkpoints(policy)) for policy in policies}
    first, *others = (found.facts.get(ENDED) for found in newest.values())
    # all are last ones; or an earlier version has written them, which marked none
    if first != 0 and all(mark == first for mark in others):
        return {}
    points = {policy: ResumePoint.of(folder, experiment, [policy], leads=False) for policy in policies}
    done = [
        policy
        for policy, point in points.items()
        if point.limit_reached(folder.path, experiment.limits, False, ended)
    ]
    if len(done) == len(policies):
        return {}
    before = dict[Path, Path]()
    for last in map(newest.__getitem__, done):
        place = last.path.parent
        # not one that the last was about to replace, which is at the limit, too
        older = (found.path for found in readable(place) if found.path.stem != last.path.stem)
        if (path := next(older, None)) is None:
            behind = ", ".join(policy for policy in policies if policy not in done)
            raise CheckpointError(
                f"{folder.path} was {ended} between the last checkpoints of its policies: {place.name} had "
                f"reached the limit, {behind} had not, and there is none before {last.path} to go back to. "
                "Go on from the newest of each with a higher limit (--max-steps N, --max-updates N), or "
                "train anew (--anew)"
            )
        before[place] = path
    return before


def _whole(value: float) -> int:
    return int(value) if isfinite(value) else 0


def without_met_limit(folder: RunFolder, experiment: Experiment, given: Collection[str]) -> Experiment:
    """Return the experiment without the mark that its run ended by reaching, unless
    another is `given`: it would end at once again."""
    limits = experiment.limits
    summary: Any = {}
    with suppress(RunError):  # none: the run was killed
        summary = folder.read(SUMMARY)
    reason = (
        str(summary.get("reason"))
        if isinstance(summary, dict) and summary.get("status") == "completed"
        else ""
    )
    if reason.startswith("mean return ") and limits.mean_return is not None and "mean_return" not in given:
        mark = f"a mean return of {limits.mean_return:g}"
        another = "--stop-at-return X"
        without = limits.replace(mean_return=None, return_of="")
    elif limits.until and reason == limits.until and "until" not in given:
        mark, another, without = limits.until, "limits={'until': …} (Python)", limits.replace(until="")
    else:
        return experiment
    if without == Limits(window=limits.window):
        raise RunError(
            f"{folder.path} has already reached its mark, {mark}, and has no other limit; go further with a "
            f"higher one: {another}, or with --max-steps N"
        )
    print(
        f"note: the run has reached its mark, {mark}, and goes on without one ({another} sets another)",
        file=sys.stderr,
    )
    return experiment.replace(limits=without)
