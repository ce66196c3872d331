"""The losses: functions, modules that call them, and a queue of earlier keys."""
