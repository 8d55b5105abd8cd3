"""``dmsg.aio`` inside a web server that runs the event loop: uvicorn, over real TCP."""

from __future__ import annotations

import importlib.util

from twisted.trial.unittest import SkipTest

from tests.aio.test_client import ProgramCase
from tests.support import asynchronous

APP = """
import socket, threading, urllib.request
import uvicorn

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        async with dmsg.aio.listen(upper, 7, discovery=URL) as listener, dmsg.aio.Client(URL) as client:
            scope["state"].update(key=listener.key, client=client)
            await send({"type": "lifespan.startup.complete"})
            print((await receive())["type"])
        await send({"type": "lifespan.shutdown.complete"})
        return
    state = scope["state"]
    async with state["client"].connect(state["key"], 7) as (reader, writer):
        writer.write(scope["path"].encode())
        writer.write_eof()
        body = await reader.read()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})

listening = socket.create_server(("127.0.0.1", 0))
config = uvicorn.Config(app, log_level="warning", lifespan="on", loop=LOOP)
server = uvicorn.Server(config)

def ask():
    for path in ("hello", "bob"):
        print(urllib.request.urlopen(f"http://127.0.0.1:{listening.getsockname()[1]}/{path}", timeout=30).read())
    server.should_exit = True

threading.Thread(target=ask).start()
"""
SAID = "b'/HELLO'\nb'/BOB'\nlifespan.shutdown\n"


class UvicornTests(ProgramCase):
    """Requests that are answered by a peer."""

    def needs(self, module: str) -> None:
        if importlib.util.find_spec(module) is None:
            raise SkipTest(f"there is no {module} here")

    @asynchronous
    async def test_a_server_that_makes_the_loop(self) -> None:
        self.needs("uvicorn")
        self.assertEqual(await self.output_of("LOOP = 'asyncio'" + APP + "server.run(sockets=[listening])"), SAID)

    @asynchronous
    async def test_a_server_on_the_loop_of_another_implementation(self) -> None:
        self.needs("uvicorn")
        self.needs("uvloop")
        self.assertEqual(await self.output_of("LOOP = 'uvloop'" + APP + "server.run(sockets=[listening])"), SAID)

    @asynchronous
    async def test_a_server_inside_a_running_loop_that_dmsg_uses_already(self) -> None:
        self.needs("uvicorn")
        out = await self.output_of(
            "LOOP = 'none'"
            + APP
            + """
async def main():
    async with dmsg.aio.Client(URL):
        await server.serve(sockets=[listening])
asyncio.run(main())
"""
        )
        self.assertEqual(out, SAID)
