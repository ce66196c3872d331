"""Bytes that this process has handed to TCP, as the kernel counts them.

    before = bytes_sent()
    ...
    bytes_sent() - before

Summed over the process's open TCP sockets, less what was sent twice: payload and whatever the library puts around it
(gloo's headers), but not the headers of TCP and IP. Linux only; None elsewhere.
"""

import os
import socket
import struct
from pathlib import Path

# struct tcp_info of linux/tcp.h: tcpi_bytes_sent and tcpi_bytes_retrans, which kernels have from 4.19 on.
_SIZE, _SENT_AND_RESENT = 256, struct.Struct("=200xQQ")


def bytes_sent() -> int | None:
    """The total since each socket was opened; None where the kernel does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    try:
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return None
    for number in numbers:
        info = _tcp_info(number)
        if info is None:
            continue
        if len(info) < _SENT_AND_RESENT.size:
            return None  # an older kernel
        sent, resent = _SENT_AND_RESENT.unpack_from(info)
        total += sent - resent
    return total


def _tcp_info(number: int) -> bytes | None:
    """The kernel's account of an open file, if that is a TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):  # noqa: PTH115 - the link has no path
            return None
        # A duplicate, so that closing the object leaves the owner's socket open.
        with socket.socket(fileno=os.dup(number)) as own:
            if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None  # closed meanwhile
