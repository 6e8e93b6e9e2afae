"""What a request can be answered instead of what it asked for."""

STATUS = {
    "bad_request": 400,
    "mismatch": 409,
    "busy": 409,
    "version": 409,
    "quarantined": 503,
    "engine_dead": 503,
    "timeout": 504,
    "internal": 500,
}


class BridgeError(Exception):
    """A refusal or a failure with one of the kinds of `STATUS`; travels as JSON."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind

    def as_json(self) -> dict:
        return {"error": {"kind": self.kind, "message": str(self)}}
