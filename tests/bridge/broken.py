"""A simulator of another make, by the letter of layout 0 and without the package: `python
broken.py KIND [--log FILE] --memory-path PATH`.

KIND is the point of the conformance kit at which it does wrong; "nothing": at none. FILE
gets PATH, of every start. Where the environment variable HUNG names a file, that is there
once it hangs.
"""

import mmap
import os
import pathlib
import signal
import struct
import sys
import time
import uuid

WRONG, PATH = sys.argv[1].replace("-", " "), sys.argv[sys.argv.index("--memory-path") + 1]
STEP, RESET, CHANGE, CLOSE = range(4)
M = 4  # agents; one observation of 2, one branch of 3
N, OBS, REWARD, DONE, CUT, ID, MASKS, ACTIONS, END = 93, 97, 129, 145, 149, 153, 169, 181, 197
STRANGER = uuid.UUID("8bf0f3bb-5f1c-4a9c-9f7a-6a2d2e0f6c11").bytes_le


def hang():
    if "HUNG" in os.environ:
        pathlib.Path(os.environ["HUNG"]).touch()
    time.sleep(1000)


class Simulator:
    def __init__(self):
        self.path, self.parent = PATH, os.getppid()
        self.open(PATH)
        self.groups = []

    def open(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        self.path = path
        self.capacity = struct.unpack_from("<i", self.memory, 10)[0]
        self.base = 18 + self.capacity  # of the groups
        if WRONG == "start capacity" and self.capacity > 4:
            sys.exit("a side channel begins with 4 bytes")

    def wait(self):
        begun = time.monotonic()
        while self.memory[8] != 1:
            if WRONG != "sleep":
                time.sleep(0.0002)
            if WRONG == "patience" and time.monotonic() - begun > 0.15:
                sys.exit("the trainer takes too long")
            if WRONG == "turns" and time.monotonic() - begun > 0.12:  # again and again
                self.memory[self.base + OBS] = (self.memory[self.base + OBS] + 1) % 256
            if WRONG != "trainer's death" and os.getppid() != self.parent:
                sys.exit()

    def receive(self):
        """Wait for a command and take it, and all that it brings."""
        while True:
            self.wait()
            command = self.memory[9]
            if command == CHANGE and WRONG == "trainer's growth":
                hang()
            if command == CHANGE:
                old = self.path
                self.open(old + "_")
                os.unlink(old)
                continue
            if command == CLOSE:
                if WRONG not in ("close", "deleting"):
                    os.unlink(self.path)
                sys.exit(3 if WRONG == "close" else 0)
            if command > CLOSE:
                if WRONG == "unknown command":
                    hang()
                sys.exit(f"there is no command {command}")
            self.take_side_channel()
            self.take_actions()
            return command

    def take_side_channel(self):
        (length,) = struct.unpack_from("<i", self.memory, 14)
        if not 0 <= length <= self.capacity - 4:
            if WRONG == "wrong lengths":
                os.kill(os.getpid(), signal.SIGSEGV)
            sys.exit(f"a side channel of {length} bytes")
        data = self.memory[18 : 18 + length]
        while data:
            key, size = data[:16], struct.unpack("<i", data[16:20])[0]
            if WRONG == "unknown channel" and key == STRANGER:
                sys.exit("there is no such channel")
            if size > len(data) - 20:
                if WRONG == "torn side channel":
                    os.kill(os.getpid(), signal.SIGBUS)
                sys.exit(f"a message of {size} bytes")
            data = data[20 + size :]
        struct.pack_into("<i", self.memory, 14, 0)

    def take_actions(self):
        if self.groups:
            (n,) = struct.unpack_from("<i", self.memory, self.base + N)
            for action in struct.unpack_from(f"<{n}i", self.memory, self.base + ACTIONS):
                if not 0 <= action < 3:
                    if WRONG == "wrong actions":
                        os.abort()
                    sys.exit(f"there is no action {action}")

    def hand_over(self, command=STEP):
        self.memory[9] = command
        self.memory[8] = 0

    def set_groups(self, *names):
        """Go on in a larger file, with these groups."""
        new = self.memory[: self.base] + b"".join(self.group(name) for name in names)
        new = (
            struct.pack("<i", len(new))
            + new[4 : self.base - 4]
            + struct.pack("<i", len(names))
            + new[self.base :]
        )
        if WRONG != "growth":
            with open(self.path + "_", "wb") as file:
                file.write(new)
        self.hand_over(CHANGE)
        if WRONG == "growth":
            time.sleep(1000)
        self.open(self.path + "_")
        self.groups = names

    def group(self, name):
        length = 200 if WRONG == "groups" else len(name)
        about = (
            bytes([length]) + name.encode().ljust(63, b"\0") + struct.pack("<iBiii3i", M, 0, 1, 3, 1, 2, 0, 0)
        )
        return about + bytes(END - N)

    def put(self, row, agent, t, done=0, cut=0):
        """Write a row."""
        memory, base = self.memory, self.base
        struct.pack_into(
            "<2f", memory, base + OBS + 8 * row, agent, float("nan") if WRONG == "numbers" else t
        )
        if WRONG != "whole rows":
            struct.pack_into("<f", memory, base + REWARD + 4 * row, 1)
        memory[base + DONE + row], memory[base + CUT + row] = done, cut
        struct.pack_into("<i", memory, base + ID + 4 * row, agent)
        memory[base + MASKS + 3 * row : base + MASKS + 3 * row + 3] = bytes(
            [WRONG == "masks", 1, WRONG == "masks"]
        )

    def tick(self, t):
        """Agents a of 3 ask in ticks t with (t + a) % 3 > 0 and end, or are cut, in every
        eighth tick."""
        rows, over = [], t % 8 == 7
        for a in range(3):
            agent = a if WRONG != "agents" else 7
            if over:
                rows.append(
                    (agent + 50 * (WRONG == "varying agents"), t, 1 + (WRONG == "ends"), t % 16 == 15)
                )
            elif (t + a) % 3 or t % 8 == 0:
                rows.append((agent, t, 0, WRONG == "interruptions"))
        struct.pack_into("<i", self.memory, self.base + N, len(rows))
        for row, values in enumerate(rows):
            self.put(row, *values)

    def run(self):
        t = 0
        self.receive()
        self.set_groups("w")
        while True:
            if WRONG == "late groups" and t == 9:
                self.set_groups("other")
            if WRONG == "steps" and t == 12:
                sys.exit("the sky fell")
            self.tick(t)
            if WRONG == "hasty close":
                until = time.monotonic() + 0.3
                while self.memory[9] != CLOSE and time.monotonic() < until:
                    time.sleep(0.001)
                if self.memory[9] == CLOSE:
                    os.abort()
            if WRONG == "side channel" and self.capacity > 100:
                struct.pack_into("<i", self.memory, 14, 19)
            self.hand_over(WRONG == "commands")
            t += 1
            if self.receive() == RESET:
                t = 7 if WRONG == "reset" else 0


if "--log" in sys.argv:
    with open(sys.argv[sys.argv.index("--log") + 1], "a") as log:
        print(PATH, file=log)
if WRONG == "start":
    sys.exit("no licence")
Simulator().run()
