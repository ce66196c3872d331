"""Kernels are compiled here; those in `interpreted/` are interpreted, in processes of their own."""

import os

# triton reads it when a kernel is decorated: a process has one mode.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
