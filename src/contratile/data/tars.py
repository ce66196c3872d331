"""Reads the samples of an untrusted tar file in sequence.

    for key, files in grouped(stream, {"jpg": 1 << 26, "txt": 1 << 19}):
        ...                      # files: contents by extension, or a message if the sample cannot be used

Consecutive files whose names are equal up to the first dot are one sample, as in webdataset. A few bytes of a tar can
claim gigabytes, through sparse files, long headers or compression. So only files with requested extensions are read,
sizes are checked first, and compressed tars are decompressed in pieces.
"""

import bz2
import gzip
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol

MAX_HEADER = 1 << 16
"""Maximum bytes of a member's extended header; enough for a long name and attributes."""

_META = re.compile(r"__[^/]*__($|/)")


class Readable(Protocol):
    """A file, or the output of a command."""

    def read(self, size: int, /) -> bytes: ...


def grouped(stream: Readable, limits: Mapping[str, int]) -> Iterator[tuple[str, dict[str, bytes] | str]]:
    """Read the samples of a tar, compressed or not.

    Args:
        stream: The tar's bytes.
        limits: Maximum bytes of a file by its extension in lower case. Files with other extensions are skipped.

    Yields:
        The sample's key, with its files by extension, or with a message if one of them cannot be used.
    """
    key: str | None = None
    files: dict[str, bytes] | str = {}
    with tarfile.open(fileobj=_unpacked(stream), mode="r|", tarinfo=_Member) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all headers
            folder, slash, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            if not stem or not ending or not member.isreg() or _META.match(member.name):
                continue
            ending = ending.lower()
            if key is not None and key != f"{folder}{slash}{stem}":
                yield key, files
                files = {}
            key = f"{folder}{slash}{stem}"
            if ending in limits and not isinstance(files, str):
                problem = _problem(member, limits[ending], known=ending in files)
                if problem:
                    files = problem
                else:
                    opened = tar.extractfile(member)
                    assert opened is not None, "a regular file has contents"
                    files[ending] = opened.read()
        if key is not None:
            yield key, files


def _problem(member: tarfile.TarInfo, limit: int, *, known: bool) -> str:
    """Why a file must not be read; empty if it may."""
    if known:
        return "two files with the same name in the tar"
    if member.sparse is not None:
        return "a sparse file in the tar"
    if not 0 <= member.size <= limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
        return f"file of more than {size} in the tar"
    return ""


class _Member(tarfile.TarInfo):
    """A header whose size is checked before it is read into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        long = self.type in (
            *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
            *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
        )
        if long and not 0 <= self.size <= MAX_HEADER:
            raise tarfile.ReadError("extended header too long")
        return super()._proc_member(tar)  # type: ignore[misc]  # the module's hook for types of members

    def _proc_sparse(self, tar: tarfile.TarFile) -> Any:
        if self._sparse_structs[1]:  # type: ignore[attr-defined]  # (map, whether more of it follows, size)
            raise tarfile.ReadError("sparse file with a long map")
        return super()._proc_sparse(tar)  # type: ignore[misc]

    def _proc_gnusparse_10(self, *args: Any) -> None:
        raise tarfile.ReadError("sparse file with a map of any length")


# --- compression --------------------------------------------------------------------------------------------------


def _zstandard(stream: Any) -> Any:
    try:
        return import_module("compression.zstd").ZstdFile(stream)
    except ImportError:  # before Python 3.14
        raise tarfile.ReadError("zstd is not supported by this version of Python") from None


_FORMATS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstandard,
}
"""Compression formats by their first bytes. These classes decompress only what is read; tarfile would expand 10 KB to
10 GB at once."""


class _Peeked:
    """A stream whose first bytes have already been read."""

    def __init__(self, head: bytes, stream: Readable) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        found, self._head = self._head[:size], self._head[size:]
        return found or self._stream.read(size)


def _unpacked(stream: Readable) -> Any:
    head = stream.read(max(map(len, _FORMATS)))
    whole = _Peeked(head, stream)
    opener = next((opener for mark, opener in _FORMATS.items() if head.startswith(mark)), None)
    return whole if opener is None else opener(whole)
