"""A rank as a plain process: one RankSpec as JSON on stdin, its SeatAddress as a line on stdout.

Logs go to stderr. The end of stdin or of the parent means nothing to it: the engine's connection
does. Ctrl-C is for the engine, which then stops its ranks.
"""

import logging
import os
import signal
import sys

import msgspec

from coterie.runtime.rank.rank import Rank
from coterie.runtime.spec import RankSpec

_WAIT_S = 3600.0


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reply = os.dup(1)
    os.dup2(2, 1)  # what a library prints belongs to the log; nobody reads the pipe any more
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSpec)
    rank = Rank(spec)
    signal.signal(signal.SIGTERM, lambda *_: rank.stop())
    address = rank.start()
    with open(reply, "wb") as pipe:
        pipe.write(msgspec.json.encode(address) + b"\n")
    while not rank.wait(_WAIT_S):
        pass


if __name__ == "__main__":
    main()
