"""Batch jobs of Slurm that train: the script, its submission, and following one as if it
ran here."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic, sleep

from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import read_plain
from tidemill.launchers.hosts import check_hosts
from tidemill.launchers.placement import check_placed
from tidemill.launchers.slurm import slurm
from tidemill.launchers.table import chosen_launcher
from tidemill.store.fence import EPOCHS

CONFIG = "config.json"  # of the run (`run/folder.py`)
SCRIPT, LOG, JOB = "slurm.sh", "slurm.log", "slurm.job"
"""In the run's folder: the batch script, what the job writes, and its number."""
NOTICE_S = 120
"""Seconds before the end of its time at which a job is told, besides those that its
workers may take longer than others to save."""
TRAINS_S = 60
"""Seconds that a job must have besides: it is to train a while, and Slurm may tell it of
its end a minute sooner."""
SOON_S = 30
"""Seconds after its start in which a job that is told of its end is not queued again: it
would be for ever, and never train."""
WATCH = r"""
set -f
while sleep 60; do
    job=($(squeue --noheader --jobs=$0 --states=RUNNING --Format=RestartCnt:9,NodeList:9999))
    [ ${#job[@]} = 2 ] || continue
    [ ${job[0]} = $2 ] || exit 0
    there=$(scontrol show hostnames ${job[1]}) || continue
    case $'\n'$there$'\n' in *$'\n'$1$'\n'*) continue ;; esac
    scontrol requeue $0 && exit 0
done
"""
"""What the other nodes of a job do, given its number, the name of its first node, and how
often it was queued again. With ``--no-kill`` a job outlives that one, too, and with it
the runner and the script: another node has it queued again then. One that ends has its
first node no more, either; and who was cut off may find the job queued again."""
_LIVES = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING")
_LOOK_S = 0.2  # seconds between two looks into the log
_ASK_S = 2.0  # and two questions to Slurm
_LAST_S = 3.0  # seconds that a log on a shared folder may come late
_AWAY_S = 300.0  # seconds that Slurm may not answer, as while its controller is started anew


@dataclass(frozen=True)
class SlurmJob:
    """A batch job.

    run: the run's folder, from the root on
    first: words of the command that begins the run, or goes on with one that was
    again: words of the command that goes on with it once the job was requeued; empty
        where these are the first ones
    policies: those whose checkpoints it goes on from: where one has none yet, a job that
        was requeued begins anew
    hosts, cpus_per_host, gpus_per_host: of the nodes; None for `cpus_per_host`: nodes
        that no other job shares
    time, partition: as Slurm writes them; None: as the site has it
    sbatch: further options, as "--account=x"
    notice_s: seconds before the end of its time at which it is told
    """

    run: Path
    first: Sequence[str]
    again: Sequence[str] = ()
    policies: Sequence[str] = ()
    hosts: int = 1
    time: str | None = None
    partition: str | None = None
    cpus_per_host: int | None = None
    gpus_per_host: int | None = None
    sbatch: Sequence[str] = ()
    notice_s: int = NOTICE_S


def script(job: SlurmJob, folder: str, python: str) -> str:
    """Return the batch script of a job that works in `folder`. Raises `ConfigError`."""
    check_hosts(job.hosts)
    for name, value in (("--cpus-per-host", job.cpus_per_host), ("--gpus-per-host", job.gpus_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: it must be at least 1")
    options = [
        f"--job-name=tidemill-{job.run.name}",
        f"--nodes={job.hosts}",
        "--ntasks-per-node=1",
        "--exclusive" if job.cpus_per_host is None else f"--cpus-per-task={job.cpus_per_host}",
        *([f"--gpus-per-node={job.gpus_per_host}"] if job.gpus_per_host is not None else []),
        *([f"--time={job.time}"] if job.time is not None else []),
        *([f"--partition={job.partition}"] if job.partition is not None else []),
        f"--output={job.run / LOG}",
        "--open-mode=append",
        f"--signal=B:USR1@{job.notice_s}",
        "--requeue",
        "--no-kill",  # a node that is lost ends no job: its workers live again elsewhere
        *job.sbatch,
    ]
    for option in options:
        if not option.startswith("-") or not option.isprintable():
            raise ConfigError(f"--sbatch {option!r}: it must be one option of sbatch, as --account=NAME")
    if re.search(r"[\s%\\\"']", str(job.run)):
        raise ConfigError(
            f"{job.run}: Slurm wants a path without spaces, quotes, % and \\; name one with --run-dir"
        )
    least_s = job.notice_s + TRAINS_S
    if 0 < _asked(job.time) < least_s:
        minutes = ceil(least_s / 60)
        raise ConfigError(
            f"--time {job.time}: a job is told {job.notice_s} s before its end that it is to save and be "
            f"queued again, so that it must have {minutes} minutes at least: --time {minutes}"
        )
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    run = shlex.quote(str(job.run))
    command = shlex.join([python, "-m", "tidemill.cli.main"])
    requeued = _requeued(job, run) if job.again else ""
    return f"""#!/bin/bash
{lines}
cd {shlex.quote(folder)} || exit 1
(umask 077; echo "$SLURM_JOB_ID" >{run}/{JOB})
set -- {shlex.join(job.first)}
{requeued}# Before its time is over, the job is queued again, and goes on later. What is told
# before there is a runner is passed on to it once there is one.
again= told= runner= watcher=
tell() {{ if [ -n "$runner" ]; then kill -TERM "$runner" 2>/dev/null; else told=yes; fi; }}
trap 'again=$SECONDS; tell' USR1
trap tell TERM INT
others=$((${{SLURM_JOB_NUM_NODES:-1}} - 1))
if [ $others -gt 0 ]; then
    srun --nodes=$others --ntasks=$others --ntasks-per-node=1 --cpus-per-task=1 --relative=1 --mem=0 \\
        --overlap --no-kill --mpi=none --quiet \\
        bash -c {shlex.quote(WATCH)} $SLURM_JOB_ID $SLURMD_NODENAME ${{SLURM_RESTART_COUNT:-0}} \\
        </dev/null 2>/dev/null &
    watcher=$!
    disown
fi
{command} "$@" &
runner=$!
if [ -n "$told" ]; then tell; fi
wait $runner
while kill -0 $runner 2>/dev/null; do wait $runner; done
wait $runner
status=$?
if [ -n "$watcher" ]; then kill $watcher 2>/dev/null; fi
if [ -n "$again" ] && [ $status != 0 ]; then
    if [ $again -ge {SOON_S} ]; then
        scontrol requeue $SLURM_JOB_ID
    else
        echo "the job was told of its end $again s after its start, and is not queued again: it would be" \\
            "for ever; go on with more time (--time) by: tidemill resume" {run} "--launch slurm"
    fi
fi
exit $status
"""


def _requeued(job: SlurmJob, run: str) -> str:
    """Return the part of a script by which a run goes on, or begins anew, once its job
    was requeued. `run`: its folder, as the shell reads it."""
    return f"""if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ -e {run}/{CONFIG} ]; then
    lacking=
    for policy in {shlex.join(job.policies)}; do
        saved=({run}/checkpoints/"$policy"/update-*)
        if [ ! -e "${{saved[0]}}" ]; then lacking="$lacking $policy"; fi
    done
    if [ -z "$lacking" ]; then
        set -- {shlex.join(job.again)}
    else
        # It has nothing to go on from. The files of the job stay, and who leads the run.
        aside={run}-until-$(date +%Y%m%d-%H%M%S)
        echo "the run had no checkpoint yet of$lacking, and begins anew; what it has left is in $aside"
        mkdir -m 700 "$aside"
        find {run} -mindepth 1 -maxdepth 1 ! -name 'slurm.*' ! -name {EPOCHS} -exec mv -t "$aside" {{}} +
    fi
fi
"""


def _asked(time: str | None) -> int:
    """Return the seconds of a time as sbatch takes it: minutes, "minutes:seconds",
    "hours:minutes:seconds", or days, "-" and hours on; 0 for none, for one without an
    end, and for what sbatch is to refuse."""
    days, dash, rest = (time or "").rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in (*parts, days or "0")):
        return 0
    if dash:
        parts += ["0"] * (3 - len(parts))
    elif len(parts) < 3:
        parts = ["0", *parts, "0"][:3]
    hours, minutes, seconds = map(int, parts)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_options(launch: str, experiment: Experiment | None = None) -> None:
    """Raise `ConfigError` for what a job would refuse once it has waited for its nodes.
    `experiment`: None of a run that goes on."""
    _, _, options = chosen_launcher(launch)
    check_hosts(options.get("hosts"))
    if experiment is not None:
        check_placed(experiment, options.get("place") or {})


def submit(job: SlurmJob) -> str:
    """Write the script into the run's folder, which need not be there, and submit it;
    return the job's number. Raises `TidemillError`, and leaves all as it was then."""
    new = job.run / f"{SCRIPT}.new"
    try:
        job.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = script(job, os.getcwd(), sys.executable)
        with open(new, "w", opener=private) as file:
            file.write(text)
        number = slurm("sbatch", "--parsable", str(new)).strip().partition(";")[0]
    except BaseException:
        new.unlink(missing_ok=True)
        with suppress(OSError):  # it has other files
            job.run.rmdir()
        raise
    new.replace(job.run / SCRIPT)
    with open(job.run / JOB, "w", opener=private) as file:
        file.write(f"{number}\n")
    return number


def check_free(run: Path) -> None:
    """Raise `RunError` where a job has the run already, waiting or not."""
    if (run / JOB).exists() and (state := state_of(number := job_of(run))):
        raise RunError(
            f"{run} is job {number}, which is {state}: see it by: tidemill follow {run}; end it by: scancel "
            f"{number}; or name another folder with --run-dir"
        )


def notice_of(run: Path) -> int:
    """Return how many seconds before its end the job was to be told that a run was
    submitted as last; of one that was not, what most runs have."""
    with suppress(OSError):
        if said := re.search(rb"--signal=B:USR1@(\d{1,6})\n", read_plain(run / SCRIPT)):
            return int(said[1])
    return NOTICE_S


def job_of(run: Path) -> str:
    """Return the number of the job that a run was submitted as. Raises `RunError`."""
    try:
        number = read_plain(run / JOB).decode("ascii", "replace").strip()
    except OSError as error:
        raise RunError(f"{run} was submitted as no job of Slurm's: {error.strerror} ({run / JOB})") from None
    if not number.isdecimal():
        raise RunError(f"{run / JOB} holds no job's number")
    return number


def state_of(number: str) -> str:
    """Return in which state a job is, and why it waits ("PENDING (Resources)"); "" once
    it is over."""
    found = re.search(r"\bJobState=(\w+) Reason=(\S+)", _shown(number))
    if found is None or found[1] not in _LIVES:
        return ""
    return found[1] if found[2] == "None" else f"{found[1]} ({found[2]})"


def exit_status(number: str) -> int:
    """Return the exit status of a job that is over; 1 where Slurm does not know it, and
    where it did not complete and has none."""
    shown = _shown(number)
    found = re.search(r"\bExitCode=(\d+):", shown)
    return int(found[1]) if found and int(found[1]) else int("JobState=COMPLETED" not in shown)


def _shown(number: str) -> str:
    try:
        return slurm("scontrol", "--oneliner", "show", "job", number)
    except RunError as error:
        if "Invalid job id" in str(error):  # long over
            return ""
        raise


def follow(run: Path, number: str, told: int = 0) -> int:
    """Show what a job writes until it is over, and return its exit status. Ctrl-C asks it
    to end with a checkpoint; a second one leaves it running. `told`: bytes of the log
    that are of jobs before, and not shown. Raises `RunError` where Slurm does not answer
    for minutes, and where the job fails without a word."""
    asked, shown, before, status, answered = False, "", told, None, monotonic()
    while True:
        try:
            while status is None:
                try:
                    state = state_of(number)
                    status = None if state else exit_status(number)
                    answered = monotonic()
                except RunError as error:
                    if monotonic() - answered > _AWAY_S:
                        raise RunError(
                            f"{error}\njob {number} goes on, and is followed no more; see it again: "
                            f"tidemill follow {run}"
                        ) from None
                    state = shown
                if state not in (shown, "") and told == before:
                    print(f"job {number}: {state}; Ctrl-C ends it, with a checkpoint", flush=True)
                shown = state
                until = monotonic() + (_ASK_S if status is None else _LAST_S)
                while monotonic() < until:
                    told = _show(run / LOG, told)
                    sleep(_LOOK_S)
            if status and told == before and not asked:
                raise RunError(
                    f"job {number} ended with status {status} and wrote nothing into {run / LOG}: its nodes "
                    "may not see that folder, which they must (--run-dir, where all hosts see it, and not in "
                    f"/tmp or /dev/shm); what Slurm knows of it: scontrol show job {number}"
                )
            return status
        except KeyboardInterrupt:
            if asked:
                print(f"job {number} is followed no more; see it again: tidemill follow {run}")
                return 130
            asked = True
            pending = shown.startswith("PENDING")
            try:
                slurm("scancel", *([] if pending else ["--signal=TERM", "--batch"]), number)
                what = "was asked to end"
            except RunError as error:
                what = f"could not be asked to end: {error}"
            print(f"job {number} {what}; Ctrl-C again follows it no more", flush=True)


def _show(path: Path, told: int) -> int:
    """Show what a file holds behind `told` bytes; return how many it has."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(told)
        text = file.read()
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        told += len(text)
    return told
