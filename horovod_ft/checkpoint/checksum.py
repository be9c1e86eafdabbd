"""Checksums of files. They find accidents, not attackers: whoever can change a file can change the checksum too.

XXH3 with 128 bits (Yann Collet, https://xxhash.com): about as fast as memory, and two different files have the same one
with a probability of about 3e-39.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

#: Bytes that are hashed and then written, or read and then hashed, while they are in the cache of a core. xxhash lets
#: other threads run while it hashes as many (from about 100 kB on), so a background thread does not hold training up.
CHUNK = 2**20
_PREFIX = "xxh3_128:"


class Hasher:
    """Counts and hashes bytes as they pass by."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.nbytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self.nbytes += len(data)

    def through(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The same bytes in chunks, each hashed just before it is handed on."""
        for block in blocks:
            view = memoryview(block)
            for start in range(0, len(view), CHUNK):
                chunk = view[start : start + CHUNK]
                self.update(chunk)
                yield chunk

    def text(self) -> str:
        """The checksum as manifests have it."""
        return f"{_PREFIX}{self._hash.hexdigest()}"


def checksum(data: bytes) -> str:
    """Of a run of bytes."""
    hasher = Hasher()
    hasher.update(data)
    return hasher.text()
