"""Cuts streams after some of their events, as a network or an endpoint does that fails.

It works inside of the endpoint's process: ``endpoint.application.add_middleware(CutStreams, cuts=[2, 5])``, before the
first request. The endpoint notices each cut as the end of the connection.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CutStreams:
    """An application whose streams are cut.

    Args:
        app: The application.
        cuts: For each of the next streams, the number of events after which it is cut; each is removed when its stream
            begins. A stream with fewer events, or without a number left, is whole.
    """

    def __init__(self, app: ASGIApp, cuts: list[int]) -> None:
        self._app, self._cuts = app, cuts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left: int | None = None

        async def cutting(message: Message) -> None:
            nonlocal left
            headers = dict(message.get("headers", ()))
            if headers.get(b"content-type", b"").startswith(b"text/event-stream") and self._cuts:
                left = self._cuts.pop(0)
            content = message.get("body", b"")
            events = content.split(b"\n\n")[:-1]
            for place, event in enumerate(events):
                if left is not None and not event.startswith(b":"):
                    if left == 0:
                        await send({**message, "body": b"".join(one + b"\n\n" for one in events[:place])})
                        raise ConnectionResetError("the stream is cut")
                    left -= 1
            await send(message)

        await self._app(scope, receive, cutting)
