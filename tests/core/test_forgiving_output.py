"""Standard output that ends nothing."""

import io
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidemill.core.forgiving_output import forgiving_output, unawaited_output

FULL = Path("/dev/full")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # whatever happens, others find theirs
    monkeypatch.setattr(sys, "stderr", sys.stderr)


def broken_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed_terminal() -> TextIO:
    ours, theirs = os.openpty()
    os.close(ours)
    return open(theirs, "w")


BROKEN = {
    "pipe": broken_pipe,
    "terminal": closed_terminal,
    "full disk": lambda: FULL.open("w"),
    "closed": lambda: _closed(),
}


def _closed() -> TextIO:
    file = broken_pipe()
    file.close()
    return file


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("kind", BROKEN)
def test_who_prints_goes_on_and_the_stream_holds_nothing_back(kind: str) -> None:
    if kind == "full disk" and not FULL.exists():
        pytest.skip("no /dev/full")
    stream = BROKEN[kind]()
    sys.stdout = sys.stderr = stream
    with forgiving_output():
        for _ in range(3):
            print("some words", flush=True)
            print("and more")
            print("x" * 100_000, file=sys.stderr)
            sys.stdout.writelines(["a", "b"])
            Console().print(Text("said"))
            with Live(Text("drawn"), console=Console(force_terminal=True)):
                pass
    assert sys.stdout is sys.stderr is stream
    stream.close()  # nothing is left to be written, which would raise now


@pytest.mark.usefixtures("bare")
def test_a_disk_that_is_free_again_gets_what_comes_then(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        sys.stdout = file
        with forgiving_output():
            print("before", flush=True)
            kept, full = os.dup(file.fileno()), os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, file.fileno())
            print("lost", flush=True)
            os.dup2(kept, file.fileno())
            print("after", flush=True)
            os.close(kept)
            os.close(full)
    assert (tmp_path / "log").read_text() == "before\nafter\n"


@pytest.mark.usefixtures("bare")
def test_letters_that_an_encoding_lacks_are_written_as_others() -> None:
    into = io.BytesIO()
    sys.stdout = io.TextIOWrapper(into, encoding="ascii")
    with forgiving_output():
        print("return – … é", "plain")
        Console().print(Text("━━─"))
    assert into.getvalue().decode() == "return - ... ? plain\n==-\n"


@pytest.mark.usefixtures("bare")
def test_the_last_of_several_threads_gives_the_stream_back() -> None:
    own = sys.stdout
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with forgiving_output():
            inside.set()
            assert leave.wait(60)

    with forgiving_output():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
    assert sys.stdout is not own
    leave.set()
    thread.join()
    assert sys.stdout is own


def full_pipe() -> tuple[int, TextIO]:
    reader, writer = os.pipe()
    return reader, open(writer, "w")


def unread_terminal() -> tuple[int, TextIO]:
    ours, theirs = os.openpty()
    return ours, open(theirs, "w")


def held_terminal() -> tuple[int, TextIO]:
    ours, stream = unread_terminal()
    os.write(ours, b"\x13")  # Ctrl-S
    while select.select([], [stream], [], 0)[1]:
        pass
    return ours, stream


def read_until(reader: int, over: Callable[[bytes], Any]) -> bytes:
    seen = b""
    while not over(seen):
        if select.select([reader], [], [], 0.01)[0]:
            seen += os.read(reader, 1 << 16)
    return seen


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("make", [full_pipe, held_terminal, unread_terminal])
def test_nobody_waits_for_a_reader_who_does_not_read(make: Callable[[], tuple[int, TextIO]]) -> None:
    reader, stream = make()
    sys.stdout = sys.stderr = stream
    with forgiving_output():
        with unawaited_output(), unawaited_output():
            for number in range(3000):  # far more than is held for a reader
                print("x" * 100, number)
            if make is held_terminal:
                os.write(reader, b"\x11")  # Ctrl-Q
            seen = read_until(
                reader,
                lambda seen: (
                    (b"x 0" in seen or make is held_terminal) and select.select([], [stream], [], 0)[1]
                ),
            )
            print("again", file=sys.stderr)
            seen += read_until(reader, lambda seen: b"again" in seen)
            assert (b"x 0" in seen, b"x 2999" in seen) == (make is not held_terminal, False)
        print("after", flush=True)
        assert b"after" in read_until(reader, lambda seen: b"after" in seen)
    assert sys.stdout is sys.stderr is stream
    stream.close()
    os.close(reader)


@pytest.mark.usefixtures("bare")
def test_what_is_read_at_once_is_whole_and_in_order_and_files_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.core.forgiving_output.PATIENCE", 120.0)  # however busy the reader's core is
    reader, sys.stdout = full_pipe()
    with (tmp_path / "log").open("w") as sys.stderr:
        seen: list[bytes] = []
        thread = threading.Thread(target=lambda: seen.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
        thread.start()
        lines = [f"{number} {'–' * 100}\n" for number in range(2000)]
        with forgiving_output(), unawaited_output():
            for line in lines:
                sys.stdout.write(line)
                sys.stderr.write(line)
        sys.stdout.close()
        thread.join(60)
    os.close(reader)
    assert b"".join(seen).decode() == (tmp_path / "log").read_text() == "".join(lines)


CLOSED = """
import os, sys
from tidemill.core.forgiving_output import forgiving_output

print("to nobody")
with forgiving_output():
    opened = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
    print("to nobody")
    os.write(opened, str(opened > 2).encode())
"""


def test_a_process_without_standard_streams_gives_their_place_to_nothing_else(tmp_path: Path) -> None:
    words = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    assert subprocess.run(words).returncode == 0
    assert (tmp_path / "file").read_text() == "True"


PROGRAM = """
import sys
from tidemill.core.forgiving_output import forgiving_output

with forgiving_output():
    for number in range(20_000):
        print("word", number)
sys.exit(7)
"""


def test_a_program_whose_reader_has_gone_ends_with_its_own_status() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"word 0\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 7)
    process.stderr.close()
