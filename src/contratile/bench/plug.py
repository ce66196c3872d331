"""Allocate the free blocks that imports left in malloc's heap, so that tensors cannot reuse them unnoticed.

    plug_holes()

A tensor in such a hole may add nothing to the resident memory, and a hole that was trimmed adds its whole length once a
part of it is used. Both depend on what was imported, not on the step that is measured. The plugs are never written to.
"""

import ctypes

LARGEST, SMALLEST = 1 << 25, 1 << 13
MOST = 100_000
"""Maximum number of plugs, in case malloc counts differently than expected."""


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def plug_holes() -> int:
    """Allocate all free blocks of at least `SMALLEST` bytes; return the number of bytes, 0 without glibc."""
    try:
        libc = ctypes.CDLL(None)
        info, malloc = libc.mallinfo2, libc.malloc
    except (OSError, AttributeError):
        return 0
    info.restype, malloc.restype, malloc.argtypes = _Info, ctypes.c_void_p, [ctypes.c_size_t]
    taken, size = 0, LARGEST
    for _ in range(MOST):
        before = info()
        malloc(size)
        after = info()
        if after.fordblks <= before.fordblks - size:  # it was in the heap
            taken += size
        elif size > SMALLEST:
            size //= 2
        else:
            break
    return taken
