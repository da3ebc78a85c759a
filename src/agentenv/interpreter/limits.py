"""Every limit of the code interpreter with its reason. Times in seconds."""

PORT = 49999
"""Where E2B's code interpreter clients connect (contract section 4)."""

KEEPALIVE_INTERVAL_S = 5.0
"""A silent cell sends a keepalive line this often, so that nothing between client and server takes the stream for dead."""

INTERRUPT_GRACE_S = 30.0
"""How long an interrupted cell may take to stop: one that floods its output in a guest that is short of CPU needs more than ten
seconds. After that its worker is ended and its variables are lost."""

SPAWNER_DEADLINE_S = 600.0
"""Longest start of the spawner, which imports pandas and matplotlib: minutes in an emulated guest whose host is busy."""

START_DEADLINE_S = 120.0
"""Longest start of a worker: node starts in seconds in an emulated guest that is short of CPU."""

ENVIRONMENT_DEADLINE_S = 5.0
"""Longest wait for the guest agent's list of variables; it is one loopback request."""

TRANSLATE_DEADLINE_S = 30.0
"""Longest translation of a TypeScript cell."""

REQUEST_MAX_BYTES = 64 << 20
"""Largest request body: code with data pasted into it. It is held in memory."""

EVENT_MAX_BYTES = 16 << 20
"""Largest single event of a worker (a result with all its representations, base64 where binary)."""

OUTPUT_PIECE_BYTES = 64 << 10
"""Most output that one line of the stream carries; the size of a pipe."""

QUEUE_MAX_EVENTS = 32
"""Events that wait for a slow client. When they are that many, the worker's pipes fill and the cell waits: no memory grows."""

CONTEXTS_MAX = 64
"""Contexts of one sandbox. Each is a process; a program that makes one per cell finds out before the guest is out of memory."""
