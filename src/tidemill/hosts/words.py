"""What two hosts tell each other besides edges: messages of any length, in numbered words
that come once and in order, also over a line that was cut."""

from collections import deque

from tidemill.core.errors import SchemaError
from tidemill.hosts.messages import WORD_BYTES, Word

MOST_TOLD_BYTES = 256 << 20
"""The most bytes that are kept of what a host was told and has not heard, of what it
tells and has not ended, and of what it has told and nobody has read."""
MOST_UNSAID_BYTES = MOST_TOLD_BYTES >> 4
"""The most bytes that may have come before the other host is told so, out of turn."""
_COST = 64  # bytes that each message counts besides its own


class Words:
    """The words between this host and another one. Any thread may tell, and one may read;
    all else is for the thread that turns the wire.

    heard: words that have come, of all the other host's life
    unsaid_bytes: of them, bytes since the other host was told last how many have come
    """

    def __init__(self) -> None:
        self.heard = self.unsaid_bytes = 0
        self._to_tell = deque[bytes]()
        self._words = deque[Word]()  # that the other host has not said to have, the oldest first
        self._said = self._counted = 0  # words that were sent, and made
        self._unheard_bytes = self._begun_bytes = 0
        self._begun: list[bytes] = []  # what has come of a message that has not ended
        self._told = deque[bytes]()  # messages that nobody has read
        self._told_bytes = self._read_bytes = 0  # of all that came, and of all that was read

    def tell(self, message: bytes) -> None:
        """Tell the other host something."""
        self._to_tell.append(message)

    @property
    def heard_all(self) -> bool:
        """True when the other host has said to have all that it was told."""
        return not self._to_tell and not self._words

    @property
    def unread(self) -> bool:
        """True when the other host has told something that nobody has read."""
        return bool(self._told)

    def read(self) -> bytes | None:
        """Return the oldest message that nobody has read, or None."""
        if not self._told:
            return None
        message = self._told.popleft()
        self._read_bytes += len(message) + _COST
        return message

    def next(self) -> Word | None:
        """Return the word that is to be sent next, or None. Raises `SchemaError` where
        the other host does not hear."""
        while self._to_tell:
            message = self._to_tell[0]
            starts = range(0, max(len(message), 1), WORD_BYTES)
            for start in starts:
                part = message[start : start + WORD_BYTES]
                self._words.append(Word(self._counted, part, start == starts[-1]))
                self._counted += 1
                self._unheard_bytes += len(part)
            self._to_tell.popleft()  # only now: `heard_all` must not miss it
        if self._unheard_bytes > MOST_TOLD_BYTES:
            raise SchemaError(f"it has not heard {self._unheard_bytes:,} bytes of what it was told")
        return self._words[self._said - self._first()] if self._said < self._counted else None

    def sent(self) -> None:
        """Note that the next word was sent."""
        self._said += 1

    def again(self) -> None:
        """Begin anew behind what the other host has said to have: the line was cut."""
        self._said = self._first()

    def take_heard(self, heard: int) -> None:
        """Note how many words the other host says that it has. Raises `SchemaError`."""
        if not 0 <= heard <= self._counted:
            raise SchemaError(f"it says that it has {heard} words, of which {self._counted} were told")
        while self._words and self._words[0].number < heard:
            self._unheard_bytes -= len(self._words.popleft().part)
        self._said = max(self._said, heard)

    def take(self, word: Word) -> None:
        """Take a word that has come, unless it is known. Raises `SchemaError`."""
        if word.number < self.heard:
            return
        nbytes = len(word.part)
        whole = nbytes <= WORD_BYTES if word.last else nbytes == WORD_BYTES
        self._begun_bytes += nbytes
        if word.number > self.heard or not whole or self._begun_bytes > MOST_TOLD_BYTES:
            raise SchemaError(
                f"it sends word {word.number} of {nbytes} bytes, where {self.heard} is next, "
                f"{WORD_BYTES} bytes come at once but for the last ones, and {MOST_TOLD_BYTES} in all"
            )
        self.heard += 1
        self.unsaid_bytes += nbytes
        self._begun.append(word.part)
        if word.last:
            self._told_bytes += self._begun_bytes + _COST
            if self._told_bytes - self._read_bytes > MOST_TOLD_BYTES:
                raise SchemaError(f"it has told over {MOST_TOLD_BYTES} bytes that nobody has read")
            self._told.append(b"".join(self._begun))
            self._begun, self._begun_bytes = [], 0

    def _first(self) -> int:
        """Return the number of the first word that the other host has not said to
        have."""
        return self._words[0].number if self._words else self._counted
