"""A row's new text while it grows: pieces that are whole characters, and where it is to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

HALF = "\ufffd"
"""What a decoder writes for the bytes of a character that is not complete."""


class TextStream:
    """Turns tokens into text piece by piece; the pieces put together are the text.

    decode(ids) -> str. `text` is what has been handed out; `pending` what may still change with the next token.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.ids: list[int] = []
        self.text = self.pending = ""
        self._start = self._done = 0  # tokens of the last piece are decoded again: a decoder may strip a text's first space

    def push(self, token: int) -> str:
        """The new piece, "" while a character is incomplete."""
        self.ids.append(token)
        before = self.decode(self.ids[self._start : self._done])
        self.pending = self.decode(self.ids[self._start :])[len(before) :]
        if not self.pending or self.pending.endswith(HALF):
            return ""
        self._start, self._done = self._done, len(self.ids)
        return self._hand_out(self.pending)

    def flush(self) -> str:
        """The rest, complete or not."""
        whole = self.decode(self.ids)
        return self._hand_out(whole[len(self.text) :] if whole.startswith(self.text) else self.pending)

    def _hand_out(self, piece: str) -> str:
        self.text, self.pending = self.text + piece, ""
        return piece


class Stops:
    """What ends a row: end-of-text ids, further ids, and strings in the new text wherever token borders fall.

    Raises ValueError for an empty string, an id outside the vocabulary, or strings without a tokenizer.
    """

    def __init__(self, stop: str | int | Iterable[str | int], eos: Iterable[int], vocabulary: int, has_text: bool):
        given = [stop] if isinstance(stop, (str, int)) else list(stop)
        self.eos, self.ids, self.strings = set(eos), set(), []
        for x in given:
            if isinstance(x, bool) or not isinstance(x, (str, int)):
                raise ValueError(f"stop={x!r} must be a string or a token id")
            if x == "":
                raise ValueError("stop='' would end every text at once: give a string of at least one character")
            if isinstance(x, int) and not 0 <= x < vocabulary:
                raise ValueError(f"stop={x} is no token id: this model has ids 0..{vocabulary - 1}")
            if isinstance(x, str) and not has_text:
                raise ValueError(f"stop={x!r} needs a tokenizer, and this model came without one: give token ids")
            (self.strings.append if isinstance(x, str) else self.ids.add)(x)
        self._longest = max(map(len, self.strings), default=0)

    def reason(self, token: int, stream: TextStream | None, read: int) -> str:
        """Why the row stops at `token`, "" if it does not; `read` characters of its text were looked at before."""
        if token in self.eos:
            return "eos"
        if token in self.ids:
            return f"stop token {token}"
        if not self.strings:
            return ""
        text = (stream.text + stream.pending)[max(0, read - self._longest + 1) :]
        found = [(text.find(s), s) for s in self.strings if s in text]
        return f"stop string {min(found)[1]!r}" if found else ""
