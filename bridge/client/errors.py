"""What a vLLM server says no with, by the kinds of docs/bridge.md, and what the line to it can do wrong."""

from jaxrl.rollout.protocol import SamplerError


class ServerError(SamplerError):
    """A server did not do what was asked. `kind` is the server's word for why, `message` the reason, `url` the server's."""

    kind = "internal"

    def __init__(self, url: str, message: str):
        super().__init__(f"vLLM server {url}: {message}")
        self.url, self.message = url, message


class BadRequest(ServerError):
    kind = "bad_request"


class Mismatch(ServerError):
    """A tensor that the server's model does not have, or has in another form; the message names it."""

    kind = "mismatch"


class Quarantined(ServerError):
    """Its weights are half those of one version: it generates nothing until a publish has gone through."""

    kind = "quarantined"


class Busy(ServerError):
    """Another publish is open."""

    kind = "busy"


class VersionRefused(ServerError):
    """The version is not above the one that is served."""

    kind = "version"


class EngineDead(ServerError):
    """The gateway answers, the engine behind it does not any more."""

    kind = "engine_dead"


class Unauthorised(ServerError):
    """The key is not the server's."""

    kind = "unauthorised"


class Unreachable(ServerError):
    """No connection, or it broke."""

    kind = "unreachable"


class TimedOut(ServerError):
    """No answer in time; whether the server did what was asked is not known."""

    kind = "timeout"


BY_KIND: dict[str, type[ServerError]] = {
    error.kind: error
    for error in (
        BadRequest,
        Mismatch,
        Quarantined,
        Busy,
        VersionRefused,
        EngineDead,
        Unauthorised,
        Unreachable,
        TimedOut,
        ServerError,
    )
}
