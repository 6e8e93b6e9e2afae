"""The seam between a publish and the ways its bytes can go."""

from collections.abc import Sequence
from typing import Any, Protocol

from bridge.client.weights import Unit


class Transport(Protocol):
    """A way to one server. Its methods are called from a thread, one at a time."""

    name: str  # as the routes call it
    staged: bool  # the server may wait with loading until all is there

    def begin(self, total_bytes: int, largest_unit: int) -> int:
        """Before a publish of so many bytes. Returns how many a bucket may have; raises SamplerError if there is no room."""

    def put(self, bucket: int, units: Sequence[Unit], publish_id: str) -> dict[str, Any]:
        """Makes the units readable for the server, one behind the other; returns the route's `source`. When this returns
        the units are not needed any more. `bucket` counts from 0 within a publish."""

    def close(self) -> None: ...
