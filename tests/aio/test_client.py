"""``dmsg.aio`` as programs on asyncio use it: each test is a program of its own, because a process has one reactor."""

from __future__ import annotations

from tests.cli.test_commands import CommandCase
from tests.forking import FORKED
from tests.support import asynchronous

HEAD = """
import asyncio, sys
import dmsg.aio
from dmsg import DmsgError, SecKey

URL = sys.argv[1]

async def upper(reader, writer):
    while data := await reader.read(65536):
        writer.write(data.upper())
        await writer.drain()
"""


class ProgramCase(CommandCase):
    """Runs programs against a network."""

    head = HEAD

    async def output_of(self, program: str, **environment: str) -> str:
        """Run a program with the URL of a discovery; return its output after checking that it has ended well."""
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        command = self.start(url, code=FORKED + self.head + program, **environment)
        status = await command.ended
        self.assertEqual((status, command.err.decode()), (0, ""))
        return command.out.decode()


class StreamTests(ProgramCase):
    """Streams as pairs of reader and writer."""

    @asynchronous
    async def test_large_data_go_both_ways_and_each_side_ends_for_itself(self) -> None:
        out = await self.output_of("""
async def main():
    async with dmsg.aio.listen(upper, 7, discovery=URL) as listener:
        async with dmsg.aio.connect(listener.key.text, 7, discovery=URL) as (reader, writer):
            async def send():
                for _ in range(40):
                    writer.write(b"x" * 100_000)
                    await writer.drain()
                writer.write_eof()
            sending = asyncio.create_task(send())
            data = await reader.read()
            await sending
            print(len(data), set(data) == {ord("X")}, writer.get_extra_info("peername").port)
asyncio.run(main())
""")
        self.assertEqual(out, "4000000 True 7\n")

    @asynchronous
    async def test_a_reader_that_does_not_read_holds_its_sender_back(self) -> None:
        out = await self.output_of("""
async def deaf(reader, writer):
    await asyncio.Event().wait()

async def main():
    async with dmsg.aio.listen(deaf, 7, discovery=URL) as listener:
        try:
            async with dmsg.aio.connect(listener.key, 7, discovery=URL) as (reader, writer):
                async with asyncio.timeout(2):
                    for count in range(10_000):
                        writer.write(bytes(100_000))
                        await writer.drain()
        except TimeoutError:
            print(count < 1000)
asyncio.run(main())
""")
        self.assertEqual(out, "True\n")

    @asynchronous
    async def test_a_handler_that_fails_breaks_its_stream_alone(self) -> None:
        out = await self.output_of("""
async def handler(reader, writer):
    if await reader.read(1) == b"!":
        raise RuntimeError("told")
    writer.write(b"fine")

async def main():
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    async with dmsg.aio.Client(URL) as bob, dmsg.aio.Client(URL) as alice, bob.listen(handler):
        async with alice.connect(bob.public_key) as good, alice.connect(bob.public_key) as bad:
            bad.writer.write(b"!")
            try:
                await bad.reader.read()
            except Exception as error:
                print(type(error).__name__)
            good.writer.write(b"?")
            print(await good.reader.read())
    print(told)
asyncio.run(main())
""")
        self.assertIn("StreamLost\nb'fine'\n", out)
        self.assertIn("RuntimeError('told')", out)


class EventLoopTests(ProgramCase):
    """A program runs several event loops, one after the other."""

    @asynchronous
    async def test_a_second_run_has_a_reactor_of_its_own(self) -> None:
        out = await self.output_of("""
async def main():
    async with dmsg.aio.listen(upper, 7, discovery=URL) as listener:
        async with dmsg.aio.connect(listener.key, 7, discovery=URL) as (reader, writer):
            writer.write(b"hello")
            print(await reader.readexactly(5))
for _ in range(2):
    asyncio.run(main())
""")
        self.assertEqual(out, "b'HELLO'\n" * 2)

    @asynchronous
    async def test_another_reactor_is_one_clear_error(self) -> None:
        out = await self.output_of("""
from twisted.internet import reactor

async def main():
    try:
        async with dmsg.aio.Client(URL):
            pass
    except dmsg.aio.WrongEventLoop as error:
        print(error)
asyncio.run(main())
""")
        self.assertIn("is installed already", out)
        self.assertEqual(len(out.splitlines()), 1)

    @asynchronous
    async def test_a_second_loop_beside_the_first_is_one_clear_error(self) -> None:
        """A second thread with an event loop of its own gets one clear error."""
        out = await self.output_of("""
import threading

async def second():
    try:
        async with dmsg.aio.Client(URL):
            pass
    except dmsg.aio.WrongEventLoop as error:
        print(error)

async def main():
    async with dmsg.aio.Client(URL):
        thread = threading.Thread(target=asyncio.run, args=[second()])
        thread.start()
        await asyncio.to_thread(thread.join)
asyncio.run(main())
""")
        self.assertIn("already uses another event loop of this process", out)
        self.assertEqual(len(out.splitlines()), 1)

    @asynchronous
    async def test_absent_peers_and_cancelled_connects_raise_at_the_caller(self) -> None:
        out = await self.output_of("""
async def try_to_connect(key, port):
    async with dmsg.aio.connect(key, port, discovery=URL):
        pass

async def main():
    async with dmsg.aio.listen(upper, 7, discovery=URL) as listener:
        for key, port in ((SecKey.generate().public, 7), (listener.key, 8)):
            try:
                await try_to_connect(key, port)
            except DmsgError as error:
                print(type(error).__name__)
        try:
            await asyncio.wait_for(try_to_connect(listener.key, 7), 1e-6)
        except TimeoutError:
            print("TimeoutError")
asyncio.run(main())
""")
        self.assertEqual(out.split(), ["EntryNotFound", "ConnectFailed", "TimeoutError"])
