"""The one tree of errors; a leaf that imports nothing of the project.

- CoterieError
  - RequestError            this request failed, the engine is alive
    - InvalidRequest        the caller must change the request (also a ValueError)
    - NotFound              no such model or request
    - QueueFull             the waiting queue is full; retry later
    - DeadlineExceeded      the request's own deadline passed
    - Cancelled             the caller or an operator aborted it
  - ConfigError             flags or files do not fit together (also a ValueError)
    - ModelError            a config.json that is not supported or not consistent
    - CheckpointError       missing, truncated or corrupt weights
  - RuntimeFailure          something of the deployment broke
    - RankDied              a rank is dead or does not answer
    - RankFault             a rank reported an exception of its own
    - EpochChanged          the step belongs to an older membership
    - EngineDead            the engine stopped
    - PlacementError        ranks cannot be placed on this machine or cluster
    - HandshakeError        two ends do not fit together (version, token, model, layout)
    - ProtocolError         a frame that does not follow the schema
"""


class CoterieError(Exception):
    """Root of all errors raised by Coterie.

    Attributes:
        status: gRPC's name of what happened; on the wire of the RPC and for its callers.
    """

    status: str = "INTERNAL"


class RequestError(CoterieError):
    """One request failed; the engine serves others."""


class InvalidRequest(RequestError, ValueError):
    """The request cannot be served as it is.

    Attributes:
        param: name of the offending field, or None.
        code: OpenAI's code of the fault, or None.
    """

    status = "INVALID_ARGUMENT"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class NotFound(RequestError):
    """The named model, method or request does not exist."""

    status = "NOT_FOUND"


class QueueFull(RequestError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: when trying again makes sense, seconds.
    """

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The deadline of this request or call passed."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(RequestError):
    """The request was aborted."""

    status = "CANCELLED"


class ConfigError(CoterieError, ValueError):
    """The configuration cannot work; the message says what to change."""

    status = "INVALID_ARGUMENT"


class ModelError(ConfigError):
    """A model folder whose config.json is missing, unsupported or inconsistent."""


class CheckpointError(ConfigError):
    """Weights are missing, truncated, corrupt or of the wrong shape."""


class RuntimeFailure(CoterieError):
    """A part of the deployment failed."""

    status = "UNAVAILABLE"


class RankDied(RuntimeFailure):
    """A rank died or stopped answering; names seat, step and epoch."""


class RankFault(RuntimeFailure):
    """A rank reported an exception of its own."""


class EpochChanged(RuntimeFailure):
    """The membership moved on while this step was running."""


class EngineDead(RuntimeFailure):
    """The engine is stopped and cannot take requests."""


class PlacementError(RuntimeFailure):
    """The ranks cannot be placed with the resources there are."""


class HandshakeError(RuntimeFailure):
    """Two ends of a connection do not belong together."""

    status = "UNAUTHENTICATED"


class ProtocolError(RuntimeFailure):
    """A frame does not follow the schema, or is too large."""

    status = "INVALID_ARGUMENT"
