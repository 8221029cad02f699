"""uvicorn's server, with a pause before it stops."""

from __future__ import annotations

from types import FrameType

import uvicorn

from gateway.api.drain import Drain


class DrainingServer(uvicorn.Server):
    """Keeps its port open after the first signal until running answers are done; a second signal ends it at once.

    While it drains, ``/ready`` says no and new work is refused with a time to retry, which a closed port can't.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.started and not self._drain.begun:
            self._drain.begin()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self._drain.over()
        return await super().on_tick(counter)
