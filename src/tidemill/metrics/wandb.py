"""Weights & Biases: the records as a run of the project "tidemill" there.

Where they go is said by the package's own variables: WANDB_MODE=offline (nothing leaves
the machine; `wandb sync` sends it later), WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY.
"""

import math
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress

from tidemill.api.metric_sink import LoggedRun, MetricSink, viewer_name
from tidemill.core.errors import RunError, needing
from tidemill.core.private_files import private
from tidemill.core.untrusted_files import read_plain

ID = "wandb-id"
LAST_RECORDS = 60.0  # seconds that a run's end waits for its records to be sent


class WeightsAndBiases(MetricSink):
    """The sink logs each record to Weights & Biases at its env step. A resumed run goes
    on as the same one there. Nothing but the records and the experiment's settings is
    told: no command line, no code, no packages and no output."""

    title = "Weights & Biases"
    closing_s = LAST_RECORDS + 10.0

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        with needing("--log wandb needs", 'pip install "tidemill[wandb]"', RunError):
            import wandb
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            finish_timeout=LAST_RECORDS,
            finish_timeout_raises=True,
            silent=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tidemill"),
                name=run.folder.name,
                id=self._id(),
                resume="allow",
                dir=str(run.folder),
                config=dict(run.settings),
                settings=settings,
            )
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        except (wandb.Error, OSError) as error:
            raise RunError(
                f"Weights & Biases does not take this run: {error}. Log in (wandb login), or keep it here: "
                "WANDB_MODE=offline"
            ) from error

    def _id(self) -> str:
        """Return what the run is called there, as an earlier life noted it, or anew."""
        path = self.run.folder / ID
        with suppress(OSError, UnicodeDecodeError):
            if re.fullmatch(r"[0-9a-f]{16}", known := read_plain(path).decode()):
                return known
        name = secrets.token_hex(8)
        with open(path, "w", opener=private) as file:
            file.write(name)
        return name

    def write(self, record: Mapping[str, float]) -> None:
        self._run.log({viewer_name(name): value for name, value in record.items() if math.isfinite(value)})

    def close(self) -> None:
        try:
            self._run.finish()
        except TimeoutError:
            raise RunError(
                f"its server has not taken all records within {LAST_RECORDS:g} s of the run's end; they are "
                f"kept here. Send them with: wandb sync {self._run.settings.sync_dir}"
            ) from None
