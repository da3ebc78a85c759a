"""For every test: the signals a person's terminal would give. A run started by nohup or in the background ignores some."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_ignored, signal.SIG_DFL)
