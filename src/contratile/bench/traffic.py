"""How many bytes this process has sent over TCP, as the kernel counts them.

    before = bytes_sent()
    ...
    bytes_sent() - before

Summed over the open TCP sockets of the process, without retransmissions. Headers of the library (gloo) count, those of
TCP and IP do not. Linux only; None elsewhere.
"""

import os
import socket
import struct
from pathlib import Path

# tcpi_bytes_sent and tcpi_bytes_retrans of struct tcp_info in linux/tcp.h, since Linux 4.19.
_SIZE, _SENT_AND_RESENT = 256, struct.Struct("=200xQQ")


def bytes_sent() -> int | None:
    """Return the bytes sent since each socket was opened; None if the kernel does not count them."""
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
    """Return the kernel's tcp_info of an open file, or None if it is not a TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):  # noqa: PTH115 - the link has no path
            return None
        # A duplicate, so that closing it leaves the owner's socket open.
        with socket.socket(fileno=os.dup(number)) as own:
            if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None  # closed in the meantime
