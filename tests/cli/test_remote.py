"""`tidemill serve-env` and `tidemill doctor env`, from the words typed to the words
printed."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.cli.test_cli import refused, tidemill
from tests.remote.served import Ledger, serving

from tidemill.envs.atari import Atari
from tidemill.remote.rest_config import Rest
from tidemill.remote.session import RemoteEnv


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Sessions have time to be closed, and nothing is known of an earlier server that had
    the same port."""
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 20.0)
    monkeypatch.setattr("tidemill.remote.host._known", {})


def test_a_served_environment_is_trained_on_and_its_server_counts_every_step(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tidemill.cli.main",
        "serve-env",
        "CartPole-v1",
        "--port",
        "0",
        "--fault",
        "reply_lost=0.03",
    ]
    environment = {**os.environ, "TIDEMILL_TOKEN": "a-long-token"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            small = (
                "--launch",
                "inline",
                "--set",
                "workers.actor.lanes=4",
                "--set",
                "workers.actor.agents.0.sample_steps=16",
            )
            assert "another token" in refused(
                "train", url, "--env-arg", "token=wrong-token", "--run-dir", tmp_path / "refused", *small
            )
            assert not (tmp_path / "refused").exists()
            result = tidemill(
                "train",
                url,
                "--env-arg",
                "token=a-long-token",
                "--max-steps",
                192,
                "--run-dir",
                tmp_path / "run",
                *small,
            )
            assert result.exit_code == 0, result.output
            # the settings tuned for what it serves
            assert json.loads((tmp_path / "run" / "config.json").read_bytes())["name"] == "CartPole-v1"
        finally:
            server.send_signal(signal.SIGINT)
        told = server.stdout.read()
        assert server.wait(60) == 0, server.stderr.read()
    steps = int(re.search(r"([\d,]+) steps applied", told)[1].replace(",", ""))
    assert 192 <= steps <= 192 + 4 * 2 * 17  # and those of samples that the limit came before


def test_the_doctor_finds_a_sound_server_sound():
    with serving() as server:
        result = tidemill("doctor", "env", server.url, "--seconds", 1, "--most", 4)
    assert result.exit_code == 0, result.output
    for words in (
        "Ledger, protocol 1",
        "were done once, and answered the same",
        "steps in two sessions",
        "steps/s by sessions: 1:",
        "slot",
    ):
        assert words in result.output, result.output
    assert server.sessions.counts().sessions == 0


def test_what_the_doctor_lacks_is_said_in_a_line():
    code = "import sys; sys.modules['httpcore'] = None; from tidemill.cli.main import app; app()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "doctor", "env", "http://127.0.0.1:1"], capture_output=True, text=True
    )
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert ended.returncode == 1 and line.startswith("error: ") and 'pip install "tidemill[rest]"' in line


def test_a_served_atari_game_is_what_is_trained_on_without_a_server():
    pytest.importorskip("ale_py")
    command = [
        sys.executable,
        "-m",
        "tidemill.cli.main",
        "serve-env",
        "ALE/Pong-v5",
        "--port",
        "0",
        "--env-arg",
        "noop_max=0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            host = Rest(url=url, token="", deadline_s=30.0).host()
            assert (host.description.environment, host.spaces) == (
                "ALE/Pong-v5",
                Atari(id="Pong").build(1, 0).agents[0].spaces,
            )
            served, own = RemoteEnv(host), Atari(id="Pong", noop_max=0, num_threads=1).make_one()
            told, seen = served.reset(seed=3)[0], own.reset(seed=3)[0]
            for action in (0, 2, 3, 2, 5):
                assert np.array_equal(told, seen) and told.any()
                told, seen = served.step(action)[0], own.step(action)[0]
            served.close()
            own.close()
        finally:
            server.send_signal(signal.SIGINT)
        assert "5 steps applied" in server.stdout.read()
        assert server.wait(60) == 0, server.stderr.read()


class Random(Ledger):
    def observe(self):
        import random

        return super().observe() + random.random()


def test_the_doctor_finds_what_is_wrong():
    with serving(Random, limit=3) as server:
        server.sessions._again = lambda reply: type(reply)(
            **{**{n: getattr(reply, n) for n in reply.__struct_fields__}, "reward": -1.0}
        )
        result = tidemill("doctor", "env", server.url, "--seconds", 1)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert (
        "while the first was under way was answered otherwise" in said
        and "gave something else after 0 steps" in said
    )
    assert "nothing answers there" in tidemill("doctor", "env", server.url, "--deadline", 1).output


def test_the_doctor_needs_one_session_only():
    with serving(limit=1) as server:
        result = tidemill("doctor", "env", server.url, "--seconds", 1)
    assert (
        result.exit_code == 0
        and "steps in two sessions" in result.output
        and "1 slot, and no evaluation_steps" in " ".join(result.output.split())
    )
    with serving(Random, limit=1) as server:
        assert (
            "gave something else after 0 steps"
            in tidemill("doctor", "env", server.url, "--seconds", 1).output
        )


@pytest.mark.parametrize(
    ("faults", "told"), [({"nan_at": 1}, "is not finite"), ({"raises_at": 1}, "as the test asks")]
)
def test_the_doctor_blames_no_repeat_for_what_the_first_call_did(faults, told):
    with serving(lambda: Ledger(**faults)) as server:
        result = tidemill("doctor", "env", server.url, "--seconds", 1)
    assert (
        result.exit_code == 1
        and told in " ".join(result.output.split())
        and "sent twice" not in result.output
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["CartPol-v1"], 'did you mean "CartPole-v'),
        (["CartPole-v1", "--host", "0.0.0.0"], "token is needed"),
        (["CartPole-v1", "--fault", "latency=often"], "no distribution"),
        (["CartPole-v1", "--fault", "lost=1"], 'no fault "lost"'),
        (["CartPole-v1", "--max-sessions", "0"], "max_sessions = 0"),
        (["CartPole-v1", "--max-body-bytes", "0"], "max_body_bytes = 0"),
        (["CartPole-v1", "--idle-seconds", "-1"], "idle_seconds = -1"),
        (["pettingzoo:mpe2.simple_spread_v3"], "one of Gymnasium or an Atari game can be served"),
    ],
)
def test_what_cannot_be_served_is_refused(words, match):
    assert match in refused("serve-env", *words)
