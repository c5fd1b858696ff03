"""A port for the store of a job that a test starts."""

import random
import socket

BELOW_EPHEMERAL = range(10_000, 32_000)  # Linux gives outgoing connections ports from 32,768
_system_random = random.SystemRandom()  # not that of a forked parent


def free_port() -> int:
    """A port that nothing listens at, and that no outgoing connection takes before the store does."""
    while True:
        port = _system_random.choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
