"""Secrets in settings: values whose names say so are never written down. What is saved in
their place says where they are to be found.

A secret is best given as a reference: ``env:NAME`` is the environment variable of that
name, ``file:PATH`` what is in that file. Whoever uses the setting calls `reveal`. A
secret that is given as it is, is saved as a reference to a variable that is named after
the setting.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tidemill.core.errors import ConfigError

HIDDEN = "<secret>"
_SECRETS = {
    "token", "authtoken", "accesstoken", "password", "passwords", "passwd", "pwd", "passphrase", "secret",
    "secrets", "authorization", "auth", "apikey", "credential", "credentials", "key",
}  # fmt: skip
# before "keys" and "tokens", which by themselves are of dicts and texts
_OF_SECRETS = {"access", "api", "auth", "private", "secret"}
# words behind: an authorization header
_ADDED = {"value", "header", "string", "text", "literal", "hex", "base64"}
# words before "key" and "token": what tells an entry of a dict, or a piece of a text
_HARMLESS = {
    "action", "agent", "bos", "cls", "column", "data", "dict", "dictionary", "end", "eos", "foreign",
    "frame", "goal", "has", "image", "index", "info", "is", "item", "mask", "max", "min", "new", "next",
    "no", "num", "obs", "observation", "pad", "per", "pixel", "policy", "primary", "public", "render",
    "reward", "sep", "sort", "special", "start", "state", "step", "stop", "unk", "vector",
}  # fmt: skip
_REFERENCE = re.compile(r"env:([A-Za-z_]\w*)|\$([A-Z_][A-Z0-9_]*)")
_OURS = re.compile(r"env:TIDEMILL_\w+")
_PAIR = re.compile(r"(-{0,2}[\w.-]+)(=|:\s+)(.+)", re.DOTALL)  # "--token=…", "Authorization: …"
_NAME = re.compile(r"[\w.-]{1,100}")
_LARGEST = 1 << 16  # bytes of a file
_SHORTEST = 4  # letters of a secret that is looked for in texts
_NUMBER = 100_000  # from here on a whole number may be a secret


def _words(name: str) -> list[str]:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    while len(words) > 1 and words[-1] in _ADDED:
        words.pop()
    return words


@cache
def says_secret(name: str) -> bool:
    """True of a name whose last word says that the value is a secret: ``api_key``,
    ``X-Api-Key``, ``accessToken``, ``password``; and not ``monkey``, ``key_frames``,
    ``max_tokens``, ``observation_key`` or ``pad_token``.
    """
    words = _words(name) if _NAME.fullmatch(name) else []
    if words[-1:] in (["keys"], ["tokens"]) and words[-2:-1] and words[-2] in _OF_SECRETS:
        words[-1] = words[-1][:-1]
    if not words or words[-1] not in _SECRETS:
        return False
    return words[-1] not in ("key", "token") or words[-2:-1] == [] or words[-2] not in _HARMLESS


def hide(config: Any) -> Any:
    """Return plain data (see `core.config.encode`) as it may be saved: each secret is a
    reference."""
    taken: dict[str, str | None] = {
        match[1] or match[2]: None for _, value in _found(config) if (match := _REFERENCE.fullmatch(value))
    }

    def change(name: str, value: str) -> str:
        if value.startswith("file:"):
            return f"file:{os.path.abspath(value.removeprefix('file:'))}"
        if _REFERENCE.fullmatch(value):
            return value
        stem = variable = "_".join(["TIDEMILL", *_words(name)]).upper()
        number = 1
        while taken.setdefault(variable, value) != value:
            number += 1
            variable = f"{stem}_{number}"
        return f"env:{variable}"

    return _changed(config, change)


def reveal(config: Any) -> Any:
    """Return plain data with what its references stand for. Raises `ConfigError`, with
    the name, for what is not there."""
    return _changed(config, _revealed)


def _revealed(name: str, value: str) -> str:
    if match := _REFERENCE.fullmatch(value):
        variable = match[1] or match[2]
        if variable not in os.environ:
            raise ConfigError(
                f"{name} is read from the environment variable {variable}, which is not set; secrets are not "
                f"saved with runs, so give it again: {variable}=… before the command"
            )
        return os.environ[variable]
    if value.startswith("file:"):
        path = Path(value.removeprefix("file:"))
        try:
            if not path.is_file():
                raise FileNotFoundError(2, "there is no such file")
            with path.open("rb") as file:
                return file.read(_LARGEST).decode().strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name} is read from {path}, which cannot be read: {getattr(error, 'strerror', error)}; "
                "write it there again"
            ) from None
    return value


def references(config: Any) -> list[str]:
    """Return the references of an encoded configuration, each once, whatever they lead
    to."""
    return list(dict.fromkeys(value for _, value in _found(config) if _is_reference(value)))


def check_revealed(config: Any) -> None:
    """Raise `ConfigError` where a reference of an encoded configuration leads nowhere. A
    token that is read from ``$NAME`` may be unset."""
    for name, value in _found(config):
        if not value.startswith("$"):
            _revealed(name, value)


def known(config: Any) -> set[str]:
    """Return all secrets of an encoded configuration that are long enough to be told from
    other words."""
    found = set()
    for name, value in _found(config):
        with suppress(ConfigError):
            found.add(_revealed(name, value))
    found |= {word for value in found for word in value.split() if "://" not in word} | {
        part for value in found for part in _in_url(value)
    }
    return {value for value in found - {"Basic", "Bearer", "Token"} if len(value) >= _SHORTEST}


def shown(path: str, value: object) -> str:
    """Return a value as an error shows it; `path` says what it is of."""
    return HIDDEN if says_secret(path.rpartition(".")[2]) else repr(value)


def mask(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def hide_words(words: Sequence[str], secrets: Iterable[str] = ()) -> list[str]:
    """Return the words of a command as they may be saved: without what options and
    settings whose names say so are given, and without `secrets`."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        follows = before.startswith("-") and "=" not in before and says_secret(before)
        found.append(HIDDEN if follows and not _is_reference(word) else mask(_hide_word(word), secrets))
    return found


def _hide_word(word: str) -> str:
    parts = word.split("=")
    for number, name in enumerate(parts[:-1], 1):
        value = "=".join(parts[number:])
        if says_secret(name.rpartition(".")[2]):
            return word if _is_reference(value) else f"{'='.join(parts[:number])}={HIDDEN}"
        with suppress(ValueError):
            if (
                isinstance(content := json.loads(value), (dict, list))
                and (hidden := _changed(content, lambda *_: HIDDEN)) != content
            ):
                return f"{'='.join(parts[:number])}={json.dumps(hidden)}"
    return mask(word, _in_url(word))


def _is_reference(value: str) -> bool:
    return bool(_REFERENCE.fullmatch(value)) or value.startswith("file:")


def _in_url(text: str) -> list[str]:
    """Return the password, or the user where there is none, and what parameters hold
    whose names say so, of a URL."""
    if "://" not in text:
        return []
    try:
        parts = urlsplit(text[text.rfind("=", 0, text.index("://")) + 1 :])
        found = [parts.password or parts.username or ""]
    except ValueError:
        return []
    return [
        value
        for value in (*found, *(value for name, value in parse_qsl(parts.query) if says_secret(name)))
        if value
    ]


def _found(config: Any) -> list[tuple[str, str]]:
    """Return the name and the value of each secret."""
    found = []

    def change(name: str, value: str) -> str:
        found.append((name, value))
        return value

    _changed(config, change)
    return found


def _changed(value: Any, change: Callable[[str, str], str], name: str = "", secret: bool = False) -> Any:
    """Return plain data whose secrets are what `change` makes of them. `secret`: all of
    it is one, by its name; but for a configuration, since workers or a policy may be
    called so."""
    match value:
        case Mapping():
            inside = secret and "kind" not in value
            return {k: _changed(v, change, str(k), inside or says_secret(str(k))) for k, v in value.items()}
        case [str(first), str(second)] if not secret and not first.startswith("-") and says_secret(first):
            return type(value)((first, change(first, second)))
        case list() | tuple():
            return type(value)(
                _changed(item, change, name if not follows else str(before), secret or follows)
                for before, item in zip(("", *value), value, strict=False)
                for follows in [
                    isinstance(before, str)
                    and before.startswith("-")
                    and "=" not in before
                    and says_secret(before)
                ]
            )
        case str() if value and (secret or _OURS.fullmatch(value) or _in_url(value)):
            return change(name, value)
        case str() if (pair := _PAIR.fullmatch(value)) and says_secret(pair[1]):
            return f"{pair[1]}{pair[2]}{change(pair[1], pair[3])}"
        case int() if (
            secret and not isinstance(value, bool) and abs(value) >= _NUMBER and _words(name)[-1:] != ["key"]
        ):
            changed = change(name, str(value))
            return value if changed == str(value) else changed
    return value
