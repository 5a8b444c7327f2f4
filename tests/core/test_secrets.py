"""Secrets are known by their names, saved as references, and looked up again."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.metric_sink import LoggedRun
from tidemill.core.config import Config, decode, members
from tidemill.core.errors import ConfigError
from tidemill.core.secrets import HIDDEN, check_revealed, hide, hide_words, known, mask, reveal, says_secret
from tidemill.metrics.json_lines import read_metrics
from tidemill.metrics.writer import MetricsWriter
from tidemill.remote.rest_config import Rest, token_of
from tidemill.workers.info_numbers import InfoReader

SECRETS = (
    "token", "api_key", "X-Api-Key", "accessToken", "APIKey", "OPENAI_API_KEY", "password", "db_password",
    "client_secret", "secretKey", "key", "authorization", "Authorization-Header", "proxy_authorization",
    "token_value", "passphrase", "credentials", "--token", "TOKEN2", "api_keys", "auth_tokens", "pwd",
)  # fmt: skip
OTHERS = (
    "keyboard", "monkey", "key_frames", "keys", "tokens", "max_tokens", "token_dim", "observation_key",
    "obs_key", "pad_token", "tokenizer", "secretary", "password_file", "compass", "has_key", "hockey", "",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_name_whose_last_word_says_so_is_that_of_a_secret(name: str) -> None:
    assert says_secret(name)


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_that_only_holds_the_letters_is_not(name: str) -> None:
    assert not says_secret(name)


def test_the_only_setting_of_ours_that_holds_a_secret_is_token() -> None:
    for name in tidemill.__all__:
        getattr(tidemill, name)  # imported now
    ours = [kind for kind in members(Config).values() if kind.__module__.startswith("tidemill.")]
    names = {field.name for kind in ours for field in dataclasses.fields(kind) if says_secret(field.name)}
    assert names == {"token"} and len(ours) > 30


SETTINGS: dict[str, Any] = {
    "kind": "Experiment",
    "policies": {"key": {"kind": "ActorCritic", "hidden": [64, 64]}},  # a policy may be called so
    "kwargs": {
        "api_key": "abcdef",
        "url": "https://user:wxyz@host/x?token=zzzz&size=1",
        "headers": [["Authorization", "Bearer qwerty"], ["Accept", "text"]],
        "nested": {"X-Api-Key": "k1k1", "secret": {"left": "l1l1", "right": ("r1r1",)}},
        "lines": ("Authorization: Basic u1u1", "Accept: text"),
        "password": 12345678,
        "use": {"token": True, "secret": None, "password": "", "key": 3},
    },
    "arguments": ["--token=t1t1", "--password", "p1p1", "--port", "3", "--key"],
    "token": "$TIDEMILL_TOKEN",
    "given": {"token": "env:MINE"},
}  # fmt: skip
LITERALS = {"abcdef", "wxyz", "zzzz", "qwerty", "k1k1", "l1l1", "r1r1", "u1u1", "12345678", "t1t1", "p1p1"}


def test_what_is_saved_has_references_in_the_place_of_secrets_and_nothing_else_is_changed() -> None:
    hidden = hide(SETTINGS)
    kwargs = {
        "api_key": "env:TIDEMILL_API_KEY",
        "url": "env:TIDEMILL_URL",
        "headers": [["Authorization", "env:TIDEMILL_AUTHORIZATION"], ["Accept", "text"]],
        "nested": {
            "X-Api-Key": "env:TIDEMILL_X_API_KEY",
            "secret": {"left": "env:TIDEMILL_LEFT", "right": ("env:TIDEMILL_RIGHT",)},
        },
        "lines": ("Authorization: env:TIDEMILL_AUTHORIZATION_2", "Accept: text"),
        "password": "env:TIDEMILL_PASSWORD",
        "use": SETTINGS["kwargs"]["use"],
    }
    arguments = [
        "--token=env:TIDEMILL_TOKEN_2",
        "--password",
        "env:TIDEMILL_PASSWORD_2",
        "--port",
        "3",
        "--key",
    ]
    assert hidden == {**SETTINGS, "kwargs": kwargs, "arguments": arguments}
    assert hide(hidden) == hidden and not [literal for literal in LITERALS if literal in repr(hidden)]
    assert known(SETTINGS) >= LITERALS and known(hidden) == set()


def test_equal_secrets_of_one_name_have_one_variable() -> None:
    assert hide({"a": {"token": "1111"}, "b": {"token": "1111"}}) == {
        "a": {"token": "env:TIDEMILL_TOKEN"},
        "b": {"token": "env:TIDEMILL_TOKEN"},
    }


def test_references_are_looked_up_and_literals_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key.txt").write_text("from the file\n")
    for name, value in {"TIDEMILL_URL": "https://u:p@h", "MINE": "mine", "T": "tttt"}.items():
        monkeypatch.setenv(name, value)
    settings = {
        "url": "env:TIDEMILL_URL",
        "token": "env:MINE",
        "key": "file:key.txt",
        "path": "env:T",
        "note": "file:x",
        "pin": ["--token=env:T"],
    }
    wanted = {
        "url": "https://u:p@h",
        "token": "mine",
        "key": "from the file",
        "path": "env:T",
        "note": "file:x",
        "pin": ["--token=tttt"],
    }
    assert reveal(settings) == wanted and reveal(wanted) == wanted
    assert reveal(SETTINGS["kwargs"]) == SETTINGS["kwargs"]
    # a resumed run may be started elsewhere
    assert hide({"key": "file:key.txt"}) == {"key": f"file:{tmp_path}/key.txt"}
    assert known({"key": "file:key.txt"}) == {"from the file", "from", "file"}


def test_what_is_not_there_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_API_KEY", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"^api_key is read from the environment variable TIDEMILL_API_KEY, which is not set; .* give "
        r"it again",
    ):
        check_revealed(hide({"kwargs": {"api_key": "abcdef"}}))
    for place in ("missing", "."):
        with pytest.raises(
            ConfigError, match=r"^password is read from .*, which cannot be read: there is no such file"
        ):
            check_revealed({"password": f"file:{tmp_path / place}"})
    monkeypatch.delenv("TIDEMILL_TOKEN", raising=False)
    check_revealed({"token": "$TIDEMILL_TOKEN"})
    assert token_of("$TIDEMILL_TOKEN") is None
    with pytest.raises(ConfigError, match="TIDEMILL_TOKEN, which is not set"):
        token_of("env:TIDEMILL_TOKEN")
    monkeypatch.setenv("TIDEMILL_TOKEN", "abcdefgh")
    assert token_of("$TIDEMILL_TOKEN") == token_of("env:TIDEMILL_TOKEN") == "abcdefgh"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["train", "x.py:E", "--env-arg", "token=abc", "--max-steps", "3"],
            ["train", "x.py:E", "--env-arg", f"token={HIDDEN}", "--max-steps", "3"],
        ),
        (["--env-arg=api_key=a=b"], [f"--env-arg=api_key={HIDDEN}"]),
        (
            ["--set", "workers.actor.environment.kwargs.password=abc"],
            ["--set", f"workers.actor.environment.kwargs.password={HIDDEN}"],
        ),
        (["--set", 'a.kwargs={"key": "abc", "n": 1}'], ["--set", f'a.kwargs={{"key": "{HIDDEN}", "n": 1}}']),
        (["--token", "abc", "--port", "3"], ["--token", HIDDEN, "--port", "3"]),
        (["--env-arg", "token=env:X", "--token", "$X"], ["--env-arg", "token=env:X", "--token", "$X"]),
        (["--env-arg", "url=https://u:abcd@h/"], ["--env-arg", f"url=https://u:{HIDDEN}@h/"]),
        (["--env-arg", "word=known1", "seed=2"], ["--env-arg", f"word={HIDDEN}", "seed=2"]),
    ],
)
def test_a_command_is_saved_without_its_secrets(words: list[str], wanted: list[str]) -> None:
    assert hide_words(words, {"known1"}) == wanted


def test_no_secret_is_a_metric(tmp_path: Path) -> None:
    assert InfoReader().numbers({"api_key": 123, "score": 1, "user": {"token": 4}, "has_key": True}) == {
        "score": 1.0,
        "has_key": 1.0,
    }
    writer = MetricsWriter(LoggedRun(tmp_path))
    writer.write({"step": 1, "environment/password": 1234.0, "environment/score": 2.0})
    writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "environment/score": 2.0}]


def test_texts_are_told_without_secrets() -> None:
    assert mask(
        "Bearer qwerty and qwert of https://u:wxyz@h",
        known({"auth": "qwert", "token": "Bearer qwerty", "b": "https://u:wxyz@h"}),
    ) == (f"{HIDDEN} and {HIDDEN} of {HIDDEN}")
    with pytest.raises(ConfigError) as caught:
        decode(EnvironmentConfig, {"kind": "Rest", "url": "http://h:1", "token": 12345})
    assert "token" in str(caught.value) and "12345" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Rest(url="https://me:hunter2@host/x?token=hunter3")
    assert "hunter" not in str(caught.value)
