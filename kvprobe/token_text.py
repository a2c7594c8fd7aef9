"""Text of single tokens: one piece per token, also where a character is spread over several of them.

Decoding token by token loses both: bytes that are no text by themselves come out as replacement characters, and some decoders
drop a leading blank. So every token is turned into its bytes, and each character is given to the token that holds its first byte.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece vocabularies write a byte that has no token of its own."""
LENGTHS = ((0xC0, 1), (0xE0, 2), (0xF0, 3), (0xF8, 4))
"""Bytes of a character by its first byte: up to this value (excluded)."""

LIMIT = 2**31
"""Ids that a tokenizer can be asked for are below this and not negative."""


def pieces(tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined, the text of all of them.

    A token in which no character begins has the empty text. Bytes that are no text are written out, e.g. "\\xe2". Ids that the
    tokenizer does not know, negative ones too, become "<5000>". Worked example, with a vocabulary of single bytes: "ö." -> ["ö", "", "."].
    """
    parts = _bytes(tokenizer, ids)
    joined = b"".join(parts)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part))
    out, at, token = [""] * len(parts), 0, 0
    while at < len(joined):
        while starts[token + 1] <= at:
            token += 1
        text, size = _character(joined, at)
        out[token] += text
        at += size
    return out


def _character(joined: bytes, at: int) -> tuple[str, int]:
    """The character that begins at this byte with its size [bytes], or the byte written out."""
    size = next((n for end, n in LENGTHS if joined[at] < end), 1)
    try:
        return joined[at : at + size].decode(), size
    except UnicodeDecodeError:
        return f"\\x{joined[at]:02x}", 1


def _bytes(tokenizer, ids: Sequence[int]) -> list[bytes]:
    ids = [int(i) for i in ids]
    asked = [i for i in ids if 0 <= i < LIMIT]
    named = dict(zip(asked, tokenizer.convert_ids_to_tokens(asked)))
    names = [named.get(i) for i in ids]
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    codes = _byte_codes() if "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", "")) else None
    return [f"<{i}>".encode() if name is None else name.encode() if i in added else _of_name(name, codes) for i, name in zip(ids, names)]


def _of_name(name: str, codes: dict[str, int] | None) -> bytes:
    if codes is not None and all(c in codes for c in name):
        return bytes(codes[c] for c in name)
    found = BYTE.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else name.replace("▁", " ").encode()


@functools.cache
def _byte_codes() -> dict[str, int]:
    """Byte by the character that byte-level vocabularies (GPT-2's) write it as."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
