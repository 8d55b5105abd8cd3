"""Fork server for programs that tests start.

``dmsg`` and ``twistd`` need half a second of the processor to start, nearly all of it for imports, and the tests start
hundreds of them. :func:`install` makes ``reactor.spawnProcess`` fork these two programs from a process that has
imported their modules and does nothing else. A forked program is a child of the test like any other program, with its
own descriptors, directory and environment; one at a pseudoterminal has a session of its own. A program with other
variables of the interpreter is started as usual. ``subprocess`` forks the two programs, too, if it is not asked for
anything unusual.

A forked program ends without the interpreter's clean-up of modules: that would write to each page of memory that the
program shares with the process it was forked from, which costs ten times as much as ``dmsg --help``.

Workers of trial are forked too, each together with a fork server of its own for the programs of its tests, and so are
the commands that start entities or an agent. Only one process of a run imports the modules.

``DMSG_TESTS_FORK=0`` starts every program as usual; ``make long WHICH=programs`` runs the tests in that way.
``DMSG_TESTS_FORK=bare`` forks programs from a process that has imported nothing, so that a test of the fork server
need not wait for the imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import inspect
import io
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

COMMAND = "from dmsg.cli.entry import entry; entry()"
"""Code of the ``dmsg`` program."""
DEBUGGED = (
    "from twisted.internet.defer import setDebugging; setDebugging(True); from dmsg.cli.main import entry; entry()"
)
"""The same, with full reports of errors that nobody handled, some of which only the clean-up of modules finds."""
WORKER = "from twisted.trial._dist.workertrial import main; main()"
"""Code of a worker of trial."""
CODES = (COMMAND, DEBUGGED, "from twisted.scripts.twistd import run; run()")
"""Code after ``-c`` of the programs that are forked."""
FORKED = "# forked\n"
"""First line of other programs that are forked."""
MODULES = {
    "dmsg.cli": COMMAND,
    "dmsg.cli.network.entity_process": "from dmsg.cli.network.entity_process import main; main()",
}
"""Modules that are forked after ``-P -m``, with the code that runs each of them."""
ORDINARY: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("preexec_fn", "uid", "gid", "gids"), (None,)),
    **dict.fromkeys(("umask", "process_group"), (-1,)),
    "pass_fds": ((), []),
    "shell": (False,),
}
"""Options of ``subprocess.Popen``, with their values for a program that can be forked."""
PARENTS = frozenset({"demo", "host", "up"})
"""Commands that start programs."""
VARIABLE = "DMSG_TESTS_FORK"
"""Name of the environment variable that says how programs are forked."""
BARE = "bare"
"""Value of the variable for a fork server that has imported nothing."""
LONGEST = 200_000
"""Maximum number of bytes of a request: arguments and environment."""
MOST_DESCRIPTORS = 16
"""Maximum number of descriptors that a program may be given."""
_INTERPRETER_PREFIXES = ("PYTHON", "LC_", "LANG", "LD_", "COVERAGE", "MALLOC_")
"""Prefixes of variables that Python reads when it starts. A program for which they differ is not forked."""
_NOT_IMPORTED = ("dmsg.analytics", "dmsg.cli.__main__", "dmsg.cli.pipeline")
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that Python ignores from its start."""
_PR_SET_CHILD_SUBREAPER = 36
_REACTOR = "twisted.internet.reactor"
_BEYOND = 200
"""First descriptor beyond those that a new program closes or overwrites."""
_inherited: socket.socket | None = None
"""Connection of a forked worker to its fork server."""


def _import_all() -> None:
    """Import the modules of the programs and of workers, but no reactor: each program installs its own."""
    import hypothesis  # noqa: F401
    import twisted.scripts.twistd
    import twisted.trial._dist.worker  # noqa: F401

    import dmsg

    # The klein package imports the reactor for a function that no program calls.
    sys.modules[_REACTOR] = types.ModuleType(_REACTOR)
    for found in pkgutil.walk_packages(dmsg.__path__, "dmsg."):
        if not found.name.startswith(_NOT_IMPORTED):
            # An extra is not installed, and some modules end a program that needs it.
            with contextlib.suppress(ImportError, SystemExit):
                importlib.import_module(found.name)
    del sys.modules[_REACTOR]
    # Without these calls each worker would parse all modules again for the constants that hypothesis tries first.
    with contextlib.suppress(ImportError):
        from hypothesis.internal.charmap import charmap
        from hypothesis.internal.conjecture.providers import _get_local_constants

        charmap()
        _get_local_constants()


def reset_signals() -> None:
    """Handle signals as an interpreter does that Twisted has started.

    Twisted gives a program the default action for each signal that it ignores itself. A run of the tests may ignore
    SIGHUP, below nohup, or SIGINT, in the background of a script.
    """
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _become(request: dict[str, Any], given: list[int]) -> str:
    """Give this process the descriptors, directory, environment and arguments of the request; return its code."""
    wanted: list[int] = request["descriptors"]
    # Move the descriptors up first, so that none of them is overwritten before it has its place.
    given = [os.dup2(descriptor, 100 + place) for place, descriptor in enumerate(given)]
    os.closerange(3, 100)
    for descriptor, target in zip(given, wanted, strict=True):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)
    if request["has_session"]:
        os.setsid()
    if request["is_at_terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    code: str = request["code"]
    sys.argv = request["arguments"]
    if code != WORKER:
        reset_signals()
        if not request["is_path_safe"]:
            sys.path.insert(0, "")
        if _inherited is not None:
            install()
    is_buffered = not getattr(sys.stdout, "write_through", False)
    sys.stdin = io.TextIOWrapper(
        open(0, "rb", closefd=False),
        encoding=sys.stdin.encoding,
        errors=sys.stdin.errors,
        line_buffering=is_buffered and os.isatty(0),
    )
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        stream = io.TextIOWrapper(
            open(descriptor, "wb", buffering=0 if old.write_through else -1, closefd=False),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=not old.write_through and (name == "stderr" or os.isatty(descriptor)),
            write_through=old.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    return code


def _starts_programs(arguments: list[str]) -> bool:
    """Whether the command with these arguments starts programs."""
    return bool(PARENTS.intersection(arguments[1:2])) and "--foreground" not in arguments


def _high_socketpair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, whose descriptors are not below ``_BEYOND``."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = (socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _BEYOND)) for one in pair)
    for one in pair:
        one.close()
    return first, second


def _serve(connection: socket.socket) -> str:
    """Serve requests until the connection ends; in a forked program, return the code to run."""
    global _inherited
    while True:
        message, given, _, _ = socket.recv_fds(connection, LONGEST, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        ready, begin = os.pipe()
        between = os.fork()
        if between == 0:
            program = os.fork()
            if program == 0:
                connection.detach()
                os.read(ready, 1)
                request = pickle.loads(message)
                if request["code"] == WORKER or _starts_programs(request["arguments"]):
                    _inherited, theirs = _high_socketpair()
                    # What Python makes of the variable when it starts.
                    first = request["environment"].get("PYTHONPATH", "")
                    sys.path[:] = dict.fromkeys([*first.split(os.pathsep), *sys.path] if first else sys.path)
                    if os.fork() == 0:
                        _inherited.close()
                        _inherited = None
                        os.closerange(3, _BEYOND)
                        # Its programs close the descriptors below.
                        with theirs:
                            own = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3))
                        return _serve(own)
                    theirs.close()
                    # The worker imports this module by its name.
                    sys.modules["tests.forking"] = sys.modules["__main__"]
                return _become(request, given)
            os.write(tell, program.to_bytes(4, "big"))
            # The program has lost its parent: the kernel gives it to the test, see ForkServer.fork.
            os._exit(0)
        os.waitpid(between, 0)
        os.write(begin, b"1")
        connection.send(os.read(told, 4))
        for descriptor in (told, tell, ready, begin, *given):
            os.close(descriptor)


def _run(connection: socket.socket) -> None:
    """Serve requests; in a forked program, run its code in the namespace of this module, as ``__main__``."""
    import gc

    if os.environ.get(VARIABLE) != BARE:
        _import_all()
    gc.collect()
    gc.freeze()
    text = _serve(connection)
    code = compile(text, "<string>", "exec", dont_inherit=True)
    if text == DEBUGGED:
        exec(code, globals())
        return
    from dmsg.base.interpreter import end_process

    try:
        exec(code, globals())
    except SystemExit as end:
        end_process(end.code)
        raise
    end_process(None)


def _interpreter_variables(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_INTERPRETER_PREFIXES)}


class Program(NamedTuple):
    """Program that can be forked.

    :ivar code: one of :data:`CODES`, a value of :data:`MODULES`, :data:`WORKER`, or a program that begins with
        :data:`FORKED`.
    :ivar arguments: its name and its arguments.
    :ivar is_path_safe: whether it imports nothing from its directory, as with Python's option ``-P``.
    :ivar has_session: whether it gets a session of its own.
    :ivar is_at_terminal: whether its first descriptor is the terminal of its session.
    """

    code: str
    arguments: list[str]
    is_path_safe: bool = False
    has_session: bool = False
    is_at_terminal: bool = False


def parse(words: Iterable[Any]) -> Program | None:
    """Return the program of a command line; None if the program has to be started as usual."""
    executable, *said = map(os.fsdecode, words)
    if executable != sys.executable or not said:
        return None
    if said[0].endswith("/trial/_dist/workertrial.py"):
        return None if _is_measured() else Program(WORKER, said)
    is_path_safe = said[0] == "-P"
    if is_path_safe:
        del said[0]
    if len(said) < 2:
        return None
    option, code, *arguments = said
    if option == "-c" and (code in CODES or code.startswith(FORKED)):
        return Program(code, ["-c", *arguments], is_path_safe)
    if option == "-m" and code in MODULES and is_path_safe:
        return Program(MODULES[code], [code, *arguments], is_path_safe)
    return None


class ForkServer:
    """Client side of the process that has imported the modules."""

    def __init__(self) -> None:
        self._connection = _inherited or self._start()
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        self._environment = _interpreter_variables(dict(os.environ))
        self._prctl = ctypes.CDLL(None).prctl
        # Tests also start programs in threads.
        self._lock = threading.Lock()

    def _start(self) -> socket.socket:
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # Without -P, "import redis" would find the module beside this file.
            command = [sys.executable, "-P", __file__, str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
        return connection

    def fork(self, program: Program, environment: dict[str, str], directory: str, given: dict[int, int]) -> int | None:
        """Fork a program.

        :param given: descriptors of the program, mapped to descriptors of this process.
        :return: its process id, a child of this process; None if the program has to be started as usual.
        """
        wanted, own = _interpreter_variables(environment), dict(self._environment)
        if program.code == WORKER:
            # Trial hands the search path to its workers in this variable; _serve gives it to them.
            for variables in (wanted, own):
                variables.pop("PYTHONPATH", None)
        if wanted != own or not {0, 1, 2} <= set(given):
            return None
        request = {**program._asdict(), "environment": environment, "directory": directory, "descriptors": list(given)}
        with self._lock:
            # The kernel gives an orphan to its nearest ancestor that is a subreaper. This process is one only for the
            # moment of the fork: daemons that tests start must not become its children.
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [pickle.dumps(request)], list(given.values()))
                answer = self._connection.recv(4)
            except ConnectionError:
                return None  # The fork server has ended, and its error is on the screen.
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int.from_bytes(answer, "big") or None


@functools.cache
def fork_server() -> ForkServer:
    """Return the fork server of this process; it ends with the process."""
    return ForkServer()


def _is_measured() -> bool:
    """Whether workers measure which lines they run, from their start."""
    return any(name.startswith("COVERAGE") for name in os.environ)


def install() -> None:
    """Make ``reactor.spawnProcess`` and ``subprocess`` fork programs, and workers of trial."""
    if not sys.platform.startswith("linux") or os.environ.get(VARIABLE) == "0":
        return
    _install_in_twisted()
    _install_in_subprocess()


def _fork(program: Program, environment: Mapping[Any, Any] | None, directory: Any, given: dict[int, int]) -> int | None:
    variables = os.environ if environment is None else environment
    return fork_server().fork(
        program,
        {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
        os.path.abspath(os.fsdecode(directory or ".")),
        given,
    )


def _install_in_twisted() -> None:
    from twisted.internet.process import Process, PTYProcess

    usual = Process._trySpawnInsteadOfFork

    def fork(self: Any, *arguments: Any) -> bool:
        path, uid, gid, _, words, environment, more = arguments
        program = parse(words) if uid is None and gid is None else None
        is_at_terminal = "slavefd" in more
        if program is not None:
            given = dict.fromkeys(range(3), more["slavefd"]) if is_at_terminal else more["fdmap"]
            program = program._replace(has_session=is_at_terminal, is_at_terminal=is_at_terminal)
            pid = _fork(program, environment, path, given)
            if pid is not None:
                self.pid, self.status = pid, -1
                return True
        # Twisted always forks itself for a terminal.
        return not is_at_terminal and bool(usual(self, *arguments))

    setattr(Process, "_trySpawnInsteadOfFork", fork)
    setattr(PTYProcess, "_trySpawnInsteadOfFork", fork)


def _install_in_subprocess() -> None:
    usual: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(usual)
    # In the order in which Popen names them. -1 stands for the same descriptor of this process.
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

    def execute(self: Any, *arguments: Any, **more: Any) -> None:
        given = signature.bind(self, *arguments, **more).arguments
        words = given["args"]
        program = parse(words) if isinstance(words, list | tuple) and words else None
        if program is not None and all(given[name] in ordinary for name, ordinary in ORDINARY.items()):
            own = enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
            descriptors = {number: number if descriptor == -1 else descriptor for number, descriptor in own}
            program = program._replace(has_session=given["start_new_session"])
            pid = _fork(program, given["env"], given["cwd"], descriptors)
            if pid is not None:
                self.pid, self._child_created = pid, True
                self._close_pipe_fds(*(given[name] for name in ends))
                return
        usual(self, *arguments, **more)

    setattr(subprocess.Popen, "_execute_child", execute)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])))
