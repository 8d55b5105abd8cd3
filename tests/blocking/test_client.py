"""``dmsg.blocking`` as scripts use it: each test is a program of its own, because a process has one reactor."""

from __future__ import annotations

import signal

from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.aio.test_client import ProgramCase
from tests.support import asynchronous

HEAD = """
import sys, threading
import dmsg.blocking
from dmsg import DmsgError, SecKey

URL = sys.argv[1]

def upper(listener):
    for stream in listener:
        with stream:
            while data := stream.recv():
                stream.send(data.upper())

def serve(listener):
    threading.Thread(target=upper, args=(listener,), daemon=True).start()
"""


class ScriptTests(ProgramCase):
    """Scripts that wait."""

    head = HEAD

    @asynchronous
    async def test_large_data_go_both_ways_and_each_side_ends_for_itself(self) -> None:
        out = await self.output_of("""
with dmsg.blocking.listen(7, discovery=URL) as listener:
    serve(listener)
    with dmsg.blocking.connect(listener.key.text, 7, discovery=URL) as stream:
        def send():
            for _ in range(40):
                stream.send(b"x" * 100_000)
            stream.end()
        threading.Thread(target=send).start()
        size = 0
        while data := stream.recv():
            size += len(data)
        print(size, stream.peer.port)
""")
        self.assertEqual(out, "4000000 7\n")

    @asynchronous
    async def test_a_stream_reads_lines_like_a_file_and_times_out(self) -> None:
        out = await self.output_of("""
with dmsg.blocking.Client(URL) as bob, dmsg.blocking.Client(URL) as alice, bob.listen() as listener:
    serve(listener)
    with alice.connect(bob.public_key, stream_timeout=0.5) as stream:
        file = stream.makefile()
        file.write(b"one\\ntwo\\n")
        file.flush()
        print(file.readline(), file.readline())
        try:
            stream.recv()
        except TimeoutError as error:
            print(error)
    try:
        listener.accept(timeout=0.1)
    except TimeoutError:
        print("nobody came")
    for key, port in ((SecKey.generate().public, 0), (bob.public_key, 9)):
        try:
            alice.connect(key, port)
        except DmsgError as error:
            print(type(error).__name__)
""")
        self.assertEqual(
            out.splitlines(),
            ["b'ONE\\n' b'TWO\\n'", "the stream made no progress for 0.5 s", "nobody came", "EntryNotFound"]
            + ["ConnectFailed"],
        )

    @asynchronous
    async def test_data_sent_before_a_stream_broke_is_read_before_the_error(self) -> None:
        out = await self.output_of("""
with dmsg.blocking.Client(URL) as bob, dmsg.blocking.Client(URL) as alice, bob.listen() as listener:
    stream = alice.connect(bob.public_key)
    stream.send(b"here")
    theirs = listener.accept()
    print(theirs.recv_exactly(2))
    stream.abort()
    print(theirs.recv_exactly(2))
    try:
        theirs.recv()
    except ConnectionError as error:
        print(type(error.__cause__).__name__)
""")
        self.assertEqual(out.splitlines(), ["b'he'", "b're'", "StreamLost"])

    @asynchronous
    async def test_waiting_in_the_thread_of_the_reactor_is_one_clear_error(self) -> None:
        out = await self.output_of("""
from twisted.internet import reactor

def act():
    try:
        with dmsg.blocking.Client(URL):
            pass
    except dmsg.blocking.NotPossibleHere as error:
        print(error)
    reactor.stop()

reactor.callWhenRunning(act)
reactor.run()
""")
        self.assertIn("use dmsg, dmsg.aio or another thread", out)

    @asynchronous
    async def test_closing_a_listener_ends_the_threads_that_wait_for_a_stream(self) -> None:
        out = await self.output_of("""
def accept(listener):
    try:
        listener.accept()
    except DmsgError as error:
        print(error)

with dmsg.blocking.listen(7, discovery=URL) as listener:
    threads = [threading.Thread(target=accept, args=(listener,)), threading.Thread(target=upper, args=(listener,))]
    for thread in threads:
        thread.start()
for thread in threads:
    thread.join()
print("over")
""")
        self.assertEqual(out.splitlines(), ["the listener is closed", "over"])

    @asynchronous
    async def test_a_client_that_could_not_start_unlocks_its_key(self) -> None:
        out = await self.output_of("""
import os, tempfile
with tempfile.TemporaryDirectory() as directory:
    key = os.path.join(directory, "a.key")
    try:
        with dmsg.blocking.Client(URL, key=key, min_servers=-1):
            pass
    except ValueError:
        print("refused", os.path.exists(key + ".lock"))
    with dmsg.blocking.Client(URL, key=key) as client:
        print("started", os.path.exists(key + ".lock"))
""")
        self.assertEqual(out.splitlines(), ["refused False", "started True"])

    @asynchronous
    async def test_a_port_is_free_again_after_a_timeout(self) -> None:
        """The client has no server yet, so others cannot find it in time; the caller tries again."""
        url = await self.start_discovery()
        command = self.start(
            url,
            code=HEAD
            + """
with dmsg.blocking.Client(URL) as client:
    for attempt in range(2):
        try:
            client.listen(7, timeout=0.2)
        except DmsgError as error:
            print(type(error).__name__)
""",
        )
        self.assertEqual((await command.ended, command.out.decode().split()), (0, ["DmsgTimeout"] * 2))

    @asynchronous
    async def test_ctrl_c_ends_a_call_that_waits(self) -> None:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        command = self.start(
            url,
            code=HEAD
            + """
try:
    with dmsg.blocking.listen(7, discovery=URL) as listener:
        print("waits", flush=True)
        listener.accept()
except KeyboardInterrupt:
    print("interrupted")
""",
        )
        while b"waits" not in command.out and not command.ended.called:
            await deferLater(reactor, 0.05)
        assert command.transport is not None
        command.transport.signalProcess(signal.SIGINT.name.removeprefix("SIG"))
        self.assertEqual((await command.ended, command.out.decode().split()), (0, ["waits", "interrupted"]))
