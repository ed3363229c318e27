"""Whether a server serves, for all protocols."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ServingStatus:
    """trouble: in a few words why the server is not serving; None while it is. is_alive: it may serve later, so that
    nothing would be gained by starting it anew.
    """

    trouble: str | None = "warming up"
    is_alive: bool = True
