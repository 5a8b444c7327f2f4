"""A network share that can hang: a file system of the kernel's FUSE, which a process of
its own serves from a folder. Stopped, it is a share that hangs: what is asked of it does
not come back, without an error. It stops between two requests: who waits for one that the
server has not taken can be killed, as with NFS. Needs the right to mount (root).

Run as ``python shares.py PLACE FOLDER`` it mounts FOLDER at PLACE, and serves it until
its standard input ends, so that nothing is left, however its user ends. The protocol is
that of linux/fuse.h, version 7.31.
"""

import ctypes
import errno
import os
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEADER = struct.Struct("<IIQQIIII")  # length, operation, unique, node, user, group, process, padding
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME = 1, 2, 3, 4, 9, 10, 11, 12
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, INIT, OPENDIR = 14, 15, 16, 17, 18, 20, 26, 27
READDIR, RELEASEDIR, FSYNCDIR, CREATE, BATCH_FORGET, RENAME2 = 28, 29, 30, 35, 42, 45
UNANSWERED = FORGET, BATCH_FORGET


class NoShare(Exception):
    """A share cannot be had on this machine."""


class Share:
    """A share at `place`, whose server can be stopped."""

    def __init__(self, place: Path, server: "subprocess.Popen[bytes]") -> None:
        self.place, self._server = place, server

    def stop(self) -> None:
        """Let it hang."""
        self._server.send_signal(signal.SIGUSR1)
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """Let it answer again."""
        self._server.send_signal(signal.SIGCONT)


@contextmanager
def share_in(folder: Path) -> Iterator[Share]:
    """A share whose place is in `folder`. Raises `NoShare`."""
    place, behind = folder / "share", folder / "behind"
    place.mkdir()
    behind.mkdir()
    words = [sys.executable, __file__, str(place), str(behind)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        if server.stdout.readline() != b"mounted\n":
            raise NoShare("a share of its own needs FUSE, and the right to mount one (root)")
        share = Share(place, server)
        try:
            yield share
        finally:
            share.go_on()


class Server:
    """The server of one folder. Nothing is cached by the kernel, so that all is asked of
    it; a node is a path."""

    def __init__(self, device: int, folder: str) -> None:
        self.device, self.paths, self.nodes = device, {1: folder}, {folder: 1}
        self.busy = self.stops = False  # at a request; it stops once that is answered

    def node(self, path: str) -> int:
        if path not in self.nodes:
            self.nodes[path] = max(self.paths) + 1
            self.paths[self.nodes[path]] = path
        return self.nodes[path]

    def attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        seconds = [int(time // 1_000_000_000) for time in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        rest = [int(time % 1_000_000_000) for time in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        return ATTRIBUTES.pack(
            s.st_ino, s.st_size, s.st_blocks, *seconds, *rest, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0,
            4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(path)
        return struct.pack("<QQQQII", self.node(path), 0, 0, 0, 0, 0) + attributes

    def moved(self, old: str, new: str) -> None:
        """Let nodes below `old` be below `new`."""
        self.nodes.pop(new, None)
        for path in [path for path in self.nodes if path == old or path.startswith(f"{old}/")]:
            node = self.nodes.pop(path)
            self.paths[node] = new + path[len(old) :]
            self.nodes[self.paths[node]] = node

    def answer(self, operation: int, node: int, data: bytes) -> bytes:
        path = self.paths.get(node, "")

        def name(start: int) -> str:
            return f"{path}/{data[start:].partition(bytes(1))[0].decode()}"

        match operation:
            case 26:  # INIT
                return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0)
            case 1:  # LOOKUP
                return self.entry(name(0))
            case 3:  # GETATTR
                return struct.pack("<QII", 0, 0, 0) + self.attributes(path)
            case 4:  # SETATTR
                valid, _, _, size, _, atime, mtime, _, an, mn, _, mode, _, user, group, _ = struct.unpack(
                    "<IIQQQQQQIIIIIIII", data[:88]
                )
                if valid & 1:
                    os.chmod(path, stat.S_IMODE(mode))
                if valid & 6:
                    os.chown(path, user if valid & 2 else -1, group if valid & 4 else -1)
                if valid & 8:
                    os.truncate(path, size)
                if valid & 32:
                    os.utime(path, ns=(atime * 10**9 + an, mtime * 10**9 + mn))
                return struct.pack("<QII", 0, 0, 0) + self.attributes(path)
            case 9:  # MKDIR
                os.mkdir(name(8), struct.unpack("<I", data[:4])[0])
                return self.entry(name(8))
            case 10 | 11:  # UNLINK, RMDIR
                (os.unlink if operation == UNLINK else os.rmdir)(name(0))
                self.nodes.pop(name(0), None)
                return b""
            case 12 | 45:  # RENAME, RENAME2
                start = 8 if operation == RENAME else 16
                old, new = (part.decode() for part in data[start:].split(bytes(1))[:2])
                to = self.paths[struct.unpack("<Q", data[:8])[0]]
                os.rename(f"{path}/{old}", f"{to}/{new}")
                self.moved(f"{path}/{old}", f"{to}/{new}")
                return b""
            case 14 | 35:  # OPEN, CREATE
                flags, mode = struct.unpack("<II", data[:8])
                target = name(16) if operation == CREATE else path
                file = os.open(target, flags & ~(os.O_NOFOLLOW | os.O_DIRECT), mode)
                entry = self.entry(target) if operation == CREATE else b""
                return entry + struct.pack("<QII", file, 1, 0)  # 1: past the kernel's cache
            case 15:  # READ
                file, offset, size = struct.unpack("<QQI", data[:20])
                return os.pread(file, size, offset)
            case 16:  # WRITE
                file, offset, size = struct.unpack("<QQI", data[:20])
                return struct.pack("<II", os.pwrite(file, data[40 : 40 + size], offset), 0)
            case 17:  # STATFS
                s = os.statvfs(path)
                return struct.pack(
                    "<QQQQQIIII24x", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, 255,
                    s.f_frsize, 0,
                )  # fmt: skip
            case 18:  # RELEASE
                os.close(struct.unpack("<Q", data[:8])[0])
                return b""
            case 20 | 29 | 30:  # FSYNC, RELEASEDIR, FSYNCDIR: it keeps nothing
                return b""
            case 27:  # OPENDIR
                return struct.pack("<QII", 0, 0, 0)
            case 28:  # READDIR
                offset, size = struct.unpack("<QI", data[8:20])
                found = b""
                names = [".", "..", *sorted(os.listdir(path))]
                for number, each in enumerate(names[offset:], offset + 1):
                    text = each.encode()
                    kind = 4 if os.path.isdir(f"{path}/{each}") else 8
                    piece = struct.pack("<QQII", number, number, len(text), kind) + text
                    piece += bytes(-len(piece) % 8)
                    if len(found) + len(piece) > size:
                        break
                    found += piece
                return found
        raise OSError(errno.ENOSYS, "no such operation")

    def serve(self) -> None:
        """Answer until standard input ends."""
        while 0 not in select.select([0, self.device], [], [])[0]:
            self.busy = True
            self.serve_one()
            self.busy = False
            if self.stops:
                self.stop()

    def stop(self, *_: object) -> None:
        """Stop, once nothing is being answered."""
        self.stops = self.busy
        if not self.busy:
            os.kill(os.getpid(), signal.SIGSTOP)

    def serve_one(self) -> None:
        """Answer one request."""
        try:
            asked = os.read(self.device, 1 << 18)
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.ENOENT):
                raise
            return
        _, operation, unique, node, *_ = HEADER.unpack(asked[:40])
        if operation in UNANSWERED:
            return
        wrong, answer = 0, b""
        try:
            answer = self.answer(operation, node, asked[40:])
        except OSError as error:
            wrong = error.errno or errno.EIO
        try:
            os.write(self.device, struct.pack("<IiQ", 16 + len(answer), -wrong, unique) + answer)
        except OSError as error:  # who asked has been killed
            if error.errno != errno.ENOENT:
                raise


def main(place: str, folder: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"share", place.encode(), b"fuse.share", 6, options.encode()):  # nosuid, nodev
        raise OSError(ctypes.get_errno(), "it cannot be mounted", place)
    server = Server(device, folder)
    signal.signal(signal.SIGUSR1, server.stop)
    # whoever is left behind stopped is woken with it, and finds its standard input ended
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    print("mounted", flush=True)
    try:
        server.serve()
    finally:
        libc.umount2(place.encode(), 2)  # also while somebody is there


if __name__ == "__main__":
    main(*sys.argv[1:])
