"""What the command line has for Slurm: jobs that are submitted, and followed."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.arguments import Run
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import without_arguments

if TYPE_CHECKING:  # a command that runs nothing begins sooner without it
    from tidemill.api.experiment import Experiment

Time = Annotated[
    str | None, typer.Option(help="With --launch slurm: the job's time, as Slurm writes it: 2:00:00.")
]
Partition = Annotated[str | None, typer.Option(help="With --launch slurm: the nodes' partition.")]
CpusPerHost = Annotated[
    int | None,
    typer.Option(help="With --launch slurm: cores of each node; without it, nodes that nobody shares."),
]
GpusPerHost = Annotated[int | None, typer.Option(help="With --launch slurm: GPUs of each node.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", help='With --launch slurm: one more option of sbatch, as "--account=x".'),
]
Script = Annotated[
    bool, typer.Option("--script", help="With --launch slurm: print the batch script, and submit nothing.")
]


def is_slurm(launch: str | None) -> bool:
    """True for Slurm's launcher, whatever its options."""
    return launch is not None and without_arguments(launch) == "slurm"


@dataclass(frozen=True)
class JobOptions:
    """What the command line says of a job, each as the option of its name."""

    time: str | None
    partition: str | None
    cpus_per_host: int | None
    gpus_per_host: int | None
    sbatch: Sequence[str]
    script: bool

    def check(self, launch: str | None) -> None:
        """Raise `ConfigError` where something is said and the run is not Slurm's, or has
        its job already."""
        said = [_option(name) for name, value in vars(self).items() if value]
        if said and not is_slurm(launch):
            raise ConfigError(f"{said[0]} goes with --launch slurm alone")
        if said and not self.submits(launch):
            raise ConfigError(
                f"{said[0]} is of a job that is to be submitted, and this is within allocation "
                f"{os.environ['SLURM_JOB_ID']}, which has what it has; leave it out, or unset SLURM_JOB_ID"
            )

    def submits(self, launch: str | None) -> bool:
        """True where a run is to be a job that is not submitted yet, or only its script
        is asked for."""
        return is_slurm(launch) and (self.script or "SLURM_JOB_ID" not in os.environ)

    def submit(
        self,
        run: Path,
        hosts: int | None,
        launch: str = "",
        experiment: "Experiment | None" = None,
        anew: bool = False,
    ) -> int:
        """Submit this very command as a job, and follow it; return its exit status. What
        cannot be submitted leaves all as it was.

        launch, experiment: of a run that begins, by what it goes on once the job is
            queued again, and whose policies must have checkpoints then; one that goes on
            has none, and keeps its words
        anew: put the run aside that is there
        """
        from tidemill.launchers import slurm_job
        from tidemill.run.same_run import put_aside

        if self.script and anew:
            raise ConfigError("--anew puts a run aside, and --script submits nothing: leave one of them out")
        if not self.script:
            slurm_job.check_free(run.resolve())
        aside = put_aside(run) if anew else None
        named, run = run, run.resolve()
        # what is said of the job is done by now, and so is --anew, which would put aside
        # its own log there
        first = _words_of_the_run(sys.argv[1:])
        if first[:1] == ["train"] and not any(word.partition("=")[0] == "--run-dir" for word in first):
            first += ["--run-dir", str(run)]
        if experiment is None:
            policies, notice_s = list[str](), slurm_job.notice_of(run)
        else:
            policies = experiment.trained()
            # some workers may take long to save
            longest = max((config.farewell_s for _, config in experiment.members()), default=0.0)
            notice_s = slurm_job.NOTICE_S + ceil(longest)
        job = slurm_job.SlurmJob(
            run,
            first,
            ["resume", str(run), "--launch", launch] if policies else (),
            policies,
            1 if hosts is None else hosts,
            self.time,
            self.partition,
            self.cpus_per_host,
            self.gpus_per_host,
            self.sbatch,
            notice_s,
        )
        if self.script:
            print(slurm_job.script(job, os.getcwd(), sys.executable), end="")
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
            print(
                f"note: {run} is there now, since Slurm makes no folder for what a job writes; submit the "
                "script by: sbatch FILE",
                file=sys.stderr,
            )
            return 0
        log = run / slurm_job.LOG
        before = log.stat().st_size if log.exists() else 0
        try:
            number = slurm_job.submit(job)
        except BaseException:
            if aside is not None:
                aside.rename(named)
            raise
        if aside is not None:
            print(f"the run that was in {named} is in {aside} now")
        print(f"submitted as job {number}: {run / slurm_job.SCRIPT}")
        return slurm_job.follow(run, number, before)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words_of_the_run(words: Sequence[str]) -> list[str]:
    """Return the words of a command but for those of its job, which are Slurm's."""
    flags = ("--script", "--anew")
    options = [_option(field.name) for field in fields(JobOptions) if field.name != "script"]
    kept, rest = list[str](), iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif word not in flags and word.partition("=")[0] not in options:
            kept.append(word)
    return kept


def follow(run: Run) -> None:
    """Show what the job of a run writes, as it is written."""
    from tidemill.launchers import slurm_job

    raise typer.Exit(slurm_job.follow(run.resolve(), slurm_job.job_of(run.resolve())))
