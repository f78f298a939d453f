"""Fixed-size frames on a peer link that announce what the tensors of torch.distributed will be.

A receive is posted only after its message was announced, so it never waits for a message that
nobody sends. Frames of one link are in order: a published state follows the rounds posted before.
"""

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from coterie.errors import ProtocolError

_FRAME = struct.Struct("<BBHIIQQ")
FRAME_BYTES = _FRAME.size


class FrameType(IntEnum):
    ROUND = 1
    REPLY = 2
    STATE = 3


@dataclass(frozen=True, slots=True)
class Announcement:
    type: FrameType
    epoch: int
    value: int
    """Sequence number of a round or reply; the packed word of a state."""
    layer: int = 0
    num_tokens: int = 0
    big: bool = False
    kind: int = 0

    def pack(self) -> bytes:
        return _FRAME.pack(
            self.type, self.big, self.kind, self.layer, self.num_tokens, self.epoch, self.value
        )

    @staticmethod
    def unpack(frame: bytes, max_rows: int) -> "Announcement":
        """Raises: ProtocolError for an unknown type or an impossible size."""
        number, big, kind, layer, num_tokens, epoch, value = _FRAME.unpack(frame)
        if number not in FrameType.__members__.values() or num_tokens > max_rows:
            raise ProtocolError(f"peer announced type {number} with {num_tokens} rows")
        return Announcement(FrameType(number), epoch, value, layer, num_tokens, bool(big), kind)


def recv_frame(link: socket.socket) -> bytes:
    """Blocks until a whole frame is here.

    Raises:
        ConnectionError: the link is closed.
    """
    frame = link.recv(FRAME_BYTES, socket.MSG_WAITALL)
    if len(frame) < FRAME_BYTES:
        raise ConnectionError("link closed")
    return frame
