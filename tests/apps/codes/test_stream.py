"""Codes over streams of a network in memory, with strangers on it."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.pake import Agreement, Role, WrongCode
from dmsg.apps.codes.stream import (
    AGREE_TIMEOUT,
    CLOSE_TIMEOUT,
    EARLY_LIMIT,
    MAX_AGREEMENTS,
    MAX_WRONG_GUESSES,
    PORT,
    RUNS_BURST,
    RUNS_RATE,
    SLOW_RUN,
    CodeAgreement,
    CodeEnd,
    CodeExpired,
    CodeFactory,
    CodeUsedUp,
)
from dmsg.apps.codes.words import EXAMPLE, Code
from dmsg.discovery.lookup.nameplates import claim, find
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.testing import Lab

CODE = Code.parse(EXAMPLE)
ALICE, BOB = SecKey.from_seed(b"code alice"), SecKey.from_seed(b"code bob")
GUESS = Code(CODE.nameplate, ("guitar", "zoo", "zoo"))


class Recorder(Protocol):
    """Protocol of the application that the code protects."""

    def __init__(self, says: bytes = b"") -> None:
        self.says = says
        self.got = b""
        self.lost: Failure | None = None

    def connectionMade(self) -> None:
        if self.says:
            self.transport.write(self.says)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost = reason


def factory_of(protocol: Protocol) -> Any:
    """Return a factory of an existing protocol."""
    factory = Factory.forProtocol(lambda: protocol)
    factory.noisy = False
    return factory


class CodeStreamCase(SynchronousTestCase):
    """Alice made a code; Bob knows it; Eve does not."""

    def setUp(self) -> None:
        self.lab = lab = Lab(seed=1)
        self.addCleanup(lab.stop)
        lab.add_servers(2)
        self.alice, self.bob, self.eve = (lab.add_client(name) for name in ("alice", "bob", "eve"))
        lab.settle()
        self.clock = lab.network.host("alice")
        self.told: list[int] = []
        self.offer = CodeFactory(self.clock, CODE, self.told.append)
        self.results: list[Any] = []
        self.offer.agreed.addBoth(self.results.append)
        self.alice.listen(self.offer, PORT)

    def run_until(self, done: Any, seconds: float = 120.0) -> None:
        self.lab.network.run_until(done, seconds)

    def dial(self, client: Any, code: Code, to: Any = None) -> tuple[CodeEnd, list[Any]]:
        """Start a run of the code protocol; return its end and its results."""
        end = CodeEnd(self.clock, Role.RECEIVER, code)
        results: list[Any] = []
        end.agreed.addBoth(results.append)
        opening = client.connect((to or self.alice).public_key, factory_of(end), port=PORT)
        opening.addErrback(results.append)
        return end, results

    def silent(self) -> Recorder:
        """Connect a client that sends nothing."""
        recorder = Recorder()
        opening = self.eve.connect(self.alice.public_key, factory_of(recorder), port=PORT)
        opening.addErrback(lambda _: None)
        self.run_until(lambda: opening.called)
        return recorder


class CodeStreamTests(CodeStreamCase):
    """The honest, and who is not."""

    def test_both_sides_with_the_same_code_agree(self) -> None:
        _, results = self.dial(self.bob, CODE)
        self.run_until(lambda: results and self.results)
        one, two = results[0], self.results[0]
        self.assertEqual((one.peer, two.peer), (self.alice.public_key, self.bob.public_key))
        self.assertEqual(one.verifier, two.verifier)
        here, there = Recorder(b"from bob"), Recorder(b"from alice")
        one.proceed(here)
        # Data that arrives before the application takes the stream is not lost.
        self.lab.network.run(5.0)
        two.proceed(there)
        self.run_until(lambda: here.got == b"from alice" and there.got == b"from bob")
        here.transport.loseConnection()  # type: ignore[union-attr]
        self.run_until(lambda: here.lost is not None and there.lost is not None)

    def test_five_wrong_guesses_use_up_the_code(self) -> None:
        """The first wrong guess does not use up the code: otherwise a stranger who found the number could end any
        code.
        """
        for left in range(MAX_WRONG_GUESSES - 1, 0, -1):
            _, guessed = self.dial(self.eve, GUESS)
            self.run_until(lambda guessed=guessed: guessed)
            self.assertIsInstance(guessed[0].value, WrongCode)
            self.assertEqual((self.results, self.told.pop()), ([], left))
        _, guessed = self.dial(self.eve, GUESS)
        self.run_until(lambda: guessed and self.results)
        self.assertIsInstance(self.results[0].value, WrongCode)
        self.assertEqual(self.told, [])
        _, late = self.dial(self.bob, CODE)
        self.run_until(lambda: late)
        self.assertIsInstance(late[0], Failure)

    def test_behind_wrong_guesses_the_right_one_counts(self) -> None:
        for _ in range(MAX_WRONG_GUESSES - 1):
            _, guessed = self.dial(self.eve, GUESS)
            self.run_until(lambda guessed=guessed: guessed)
        _, results = self.dial(self.bob, CODE)
        self.run_until(lambda: results and self.results)
        self.assertEqual(self.results[0].peer, self.bob.public_key)

    def test_many_guesses_at_once_are_no_more(self) -> None:
        """All runs have this end's message before the first guess is checked."""
        guesses = [self.dial(self.eve, GUESS)[1] for _ in range(MAX_AGREEMENTS)]
        self.run_until(lambda: all(guesses))
        judged = [one for one in guesses if isinstance(one[0].value, WrongCode)]
        self.assertEqual(len(judged), MAX_WRONG_GUESSES)
        self.assertEqual(len(self.results), 1)

    def test_wrong_guesses_count_for_the_code_and_not_for_each_receiver(self) -> None:
        """A code for many receivers is not easier to guess than a code for one receiver."""
        offer, agreed, over = self.many(receivers=3)
        for _ in range(2):
            for _ in range(2):
                _, guessed = self.dial(self.eve, GUESS, self.bob)
                self.run_until(lambda guessed=guessed: guessed)
            _, results = self.dial(self.alice, CODE, self.bob)
            self.run_until(lambda results=results: results)
        self.assertEqual((len(agreed), offer.tries, offer.receivers, over), (2, MAX_WRONG_GUESSES - 4, 1, []))
        self.dial(self.eve, GUESS, self.bob)
        self.run_until(lambda: over)
        self.assertIsInstance(over[0].value, WrongCode)
        _, late = self.dial(self.alice, CODE, self.bob)
        self.run_until(lambda: late)
        self.assertIsInstance(late[0], Failure)

    def test_each_receiver_has_an_agreement_of_its_own(self) -> None:
        _, agreed, over = self.many(receivers=2)
        ends = [self.dial(client, CODE, self.bob)[1] for client in (self.alice, self.eve)]
        self.run_until(lambda: all(ends) and over)
        self.assertEqual({one.peer for one in agreed}, {self.alice.public_key, self.eve.public_key})
        self.assertEqual(len({one.verifier for one in agreed}), 2)
        readers = [Recorder(), Recorder()]
        # The first receiver is never served here, and the second gets its data all the same.
        agreed[1].proceed(Recorder(b"second"))
        for end, reader in zip(ends, readers, strict=True):
            end[0].proceed(reader)
        self.run_until(lambda: b"second" in [one.got for one in readers])
        _, late = self.dial(self.alice, CODE, self.bob)
        self.run_until(lambda: late)
        self.assertIsInstance(late[0], Failure)

    def test_an_expired_code_ends_no_stream_of_those_who_used_it(self) -> None:
        offer, agreed, over = self.many(receivers=2)
        _, results = self.dial(self.alice, CODE, self.bob)
        self.run_until(lambda: results and agreed)
        offer.expire()
        self.assertIsInstance(over[0].value, CodeExpired)
        _, late = self.dial(self.eve, CODE, self.bob)
        self.run_until(lambda: late)
        self.assertIsInstance(late[0], Failure)
        reader = Recorder()
        results[0].proceed(reader)
        agreed[0].proceed(Recorder(b"film"))
        self.run_until(lambda: reader.got == b"film")

    def many(self, receivers: int) -> tuple[CodeFactory, list[CodeAgreement], list[Any]]:
        """A code of Bob's for several receivers, the agreements, and how it ended."""
        agreed: list[CodeAgreement] = []
        over: list[Any] = []
        offer = CodeFactory(self.clock, CODE, receivers=receivers, on_agreed=agreed.append)
        offer.agreed.addBoth(over.append)
        self.bob.listen(offer, PORT)
        return offer, agreed, over

    def test_a_receiver_that_lost_against_another_one_learns_a_possible_reason(self) -> None:
        for role, is_told in ((Role.RECEIVER, True), (Role.SENDER, False)):
            end = CodeEnd(Clock(), role, CODE)
            end.connectionLost()
            error = self.failureResultOf(end.agreed, CodeUsedUp).value
            self.assertIn("before the code was compared", str(error))
            self.assertEqual("somebody else used the code" in str(error), is_told)

    def test_the_oldest_silent_stream_is_evicted_for_a_new_one(self) -> None:
        """At the limit, a new stream evicts the oldest stream that has sent nothing."""
        recorders = [self.silent() for _ in range(3 * MAX_AGREEMENTS)]
        self.lab.network.run(1.0)
        self.assertEqual(sum(one.lost is None for one in recorders), MAX_AGREEMENTS)
        _, results = self.dial(self.bob, CODE)
        self.run_until(lambda: results and self.results)
        self.assertEqual(self.results[0].peer, self.bob.public_key)
        self.run_until(lambda: all(one.lost for one in recorders))

    def test_one_key_cannot_use_up_all_agreements(self) -> None:
        """Whether its agreements are silent or have begun, and in whichever order the two come."""
        clock = Clock()
        eve, bob = (DmsgAddress(client.public_key, 0) for client in (self.eve, self.bob))
        for has_spoken in (True, False):
            offer = CodeFactory(clock, CODE)
            offer.agreed.addErrback(lambda _: None)
            ends = [offer.buildProtocol(eve) for _ in range(MAX_AGREEMENTS)]
            for end in ends:
                assert end is not None
                end.has_spoken = has_spoken
            honest = offer.buildProtocol(bob)
            assert honest is not None
            self.assertEqual(len(offer._running), MAX_AGREEMENTS)
            for _ in range(5):
                offer.buildProtocol(eve)
                clock.advance(1.0)
            offer.buildProtocol(eve)
            self.assertIn(honest, offer._running)
            offer.agreed.cancel()

    def test_a_guesser_that_stalls_gives_way_after_seconds(self) -> None:
        """A guesser that stops in the middle has some seconds until it is evicted."""

        class Mute(CodeEnd):
            def dataReceived(self, data: bytes) -> None:
                """Say no more."""

        for _ in range(MAX_AGREEMENTS):
            end = Mute(self.clock, Role.RECEIVER, GUESS)
            end.agreed.addErrback(lambda _: None)
            self.eve.connect(self.alice.public_key, factory_of(end), port=PORT).addErrback(lambda _: None)
        self.lab.network.run(SLOW_RUN + 1.0)
        _, results = self.dial(self.bob, CODE)
        self.run_until(lambda: results and self.results)
        self.assertEqual(self.results[0].peer, self.bob.public_key)

    def test_idle_guessers_are_disconnected(self) -> None:
        recorders = [self.silent() for _ in range(MAX_AGREEMENTS)]
        self.lab.network.run(AGREE_TIMEOUT + 2)
        self.assertTrue(all(one.lost for one in recorders))
        _, results = self.dial(self.bob, CODE)
        self.run_until(lambda: results)
        self.assertEqual(results[0].peer, self.alice.public_key)

    def test_a_pause_of_this_process_disconnects_nobody(self) -> None:
        (recorder,) = [self.silent()]
        self.lab.network.run(1.0)
        host = self.lab.network.host("alice")
        host.pause()
        self.lab.network.run(AGREE_TIMEOUT)
        host.resume()
        self.lab.network.run(AGREE_TIMEOUT - 2.0)
        self.assertIsNone(recorder.lost)
        self.lab.network.run(3.0)
        self.assertIsNotNone(recorder.lost)

    def test_streams_without_a_guess_do_not_use_up_a_code(self) -> None:
        """The rate of runs is limited, because each run takes this end's time."""
        clock = Clock()
        offer = CodeFactory(clock, CODE)
        results: list[Any] = []
        offer.agreed.addBoth(results.append)
        ends = [offer.buildProtocol(None) for _ in range(1000)]
        self.assertEqual(sum(end is not None for end in ends), RUNS_BURST)
        clock.advance(1.0)
        self.assertEqual(sum(offer.buildProtocol(None) is not None for _ in range(100)), RUNS_RATE)
        self.assertEqual(results, [])

    def test_a_discovery_that_returns_another_key_cannot_intercept(self) -> None:
        """The nameplate leads to Eve, who forwards every byte. Neither Alice nor Bob accepts her key."""

        class Carrier(Protocol):
            other: Any = None

            def dataReceived(self, data: bytes) -> None:
                self.other.transport.write(data)

        eve = self.eve
        alice = self.alice

        class Between(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> Protocol:
                one, two = Carrier(), Carrier()
                one.other, two.other = two, one
                opening = eve.connect(alice.public_key, factory_of(two), port=PORT)
                opening.addErrback(lambda _: None)
                # Bob's first message waits until the application takes the stream.
                waiting: list[bytes] = []
                one.dataReceived = waiting.append  # type: ignore[method-assign,assignment]

                def connected(_: Any) -> None:
                    del one.dataReceived
                    for data in waiting:
                        two.transport.write(data)  # type: ignore[union-attr]

                opening.addCallback(connected)
                return one

        self.eve.listen(Between(), PORT)
        _, results = self.dial(self.bob, CODE, self.eve)
        self.run_until(lambda: results and self.told)
        self.assertIsInstance(results[0].value, WrongCode)
        self.assertEqual((self.results, self.told), ([], [MAX_WRONG_GUESSES - 1]))

    def test_data_behind_the_proof_is_held_within_a_limit(self) -> None:
        """Data behind an invalid message and behind the last message of the proof are both held only up to a limit."""

        class Transport(StringTransport):
            binding = bytes(32)
            producing = True
            aborting = False

            def getPeer(self) -> Any:
                return DmsgAddress(BOB.public)

            def getHost(self) -> Any:
                return DmsgAddress(ALICE.public)

            def pauseProducing(self) -> None:
                self.producing = False

            def resumeProducing(self) -> None:
                self.producing = True

            def abortConnection(self) -> None:
                self.aborting = True

        def end(role: Role) -> tuple[CodeEnd, Any]:
            made = CodeEnd(Clock(), role, CODE)
            transport: Any = Transport()
            made.makeConnection(transport)
            return made, transport

        sender, transport = end(Role.SENDER)
        self.failed = sender.agreed.addErrback(lambda _: None)
        sender.dataReceived(b"\x09\x00\x00")
        for _ in range(100):
            sender.dataReceived(bytes(100_000))
        self.assertEqual(sender._early_data, [])
        sender._reactor.advance(CLOSE_TIMEOUT)  # type: ignore[attr-defined]
        self.assertTrue(transport.aborting)

        known = Agreement(Role.RECEIVER, CODE.password, local=BOB.public, remote=ALICE.public, binding=bytes(32))
        sender, transport = end(Role.SENDER)
        sender.dataReceived(known.data_to_send())
        known.receive_data(transport.value())
        sender.dataReceived(known.data_to_send())
        agreed = self.successResultOf(sender.agreed)
        self.assertFalse(transport.producing)
        sender.dataReceived(b"early")

        class Pauses(Protocol):
            got = b""

            def dataReceived(self, data: bytes) -> None:
                self.got += data
                self.transport.pauseProducing()  # type: ignore[union-attr]

        protocol = Pauses()
        agreed.proceed(protocol)
        self.assertEqual(protocol.got, b"early")
        self.assertFalse(transport.producing)  # The transport is paused, as the application wants.
        sender, transport = end(Role.SENDER)
        known = Agreement(Role.RECEIVER, CODE.password, local=BOB.public, remote=ALICE.public, binding=bytes(32))
        sender.dataReceived(known.data_to_send())
        known.receive_data(transport.value())
        sender.dataReceived(known.data_to_send())
        while not transport.aborting:
            sender.dataReceived(bytes(100_000))
            self.assertLess(sum(map(len, sender._early_data)), EARLY_LIMIT + 1)

    def test_a_stranger_that_leaves_without_an_answer_has_used_its_guess(self) -> None:
        """The nameplate leads to a stranger. If the stranger does not answer, the stream counts as a guess."""

        class Thief(CodeEnd):
            def dataReceived(self, data: bytes) -> None:
                if self._agreement is not None and self._agreement.awaits_guess:
                    self._abort()
                else:
                    super().dataReceived(data)

        def thief() -> CodeEnd:
            end = Thief(self.clock, Role.SENDER, GUESS)
            end.agreed.addErrback(lambda _: None)
            return end

        factory = Factory.forProtocol(thief)
        factory.noisy = False
        self.eve.listen(factory, PORT)
        _, results = self.dial(self.bob, CODE, self.eve)
        self.run_until(lambda: results)
        self.assertIn("is it still good?", str(results[0].value))

    def test_a_plain_stream_is_refused_because_it_has_no_binding(self) -> None:
        """No message is sent over the stream."""
        end = CodeEnd(self.clock, Role.RECEIVER, CODE)
        results: list[Any] = []
        end.agreed.addBoth(results.append)

        class Plain:
            binding = None
            aborted = False

            def getPeer(self) -> None:
                return None

            getHost = getPeer

            def abortConnection(self) -> None:
                self.aborted = True

        plain: Any = Plain()
        end.makeConnection(plain)
        self.assertIn("need a secure stream", str(results[0].value))
        self.assertTrue(plain.aborted)

    def test_the_lab_claims_finds_and_releases_nameplates(self) -> None:
        """Claimed, found and released through the discovery that is there."""
        lookups = self.alice._lookups
        claimed: list[Any] = []
        Deferred.fromCoroutine(claim(lookups, self.alice._key)).addBoth(claimed.append)
        self.run_until(lambda: claimed)
        found: list[Any] = []
        Deferred.fromCoroutine(find(self.bob._lookups, claimed[0].number)).addBoth(found.append)
        self.run_until(lambda: found)
        self.assertEqual(found, [self.alice.public_key])


class KilledTests(CodeStreamCase):
    """If either program is killed after some number of messages, the code is either used up or valid for the next
    attempt.
    """

    def test_bob_is_killed_at_each_message(self) -> None:
        for steps in range(0, 60, 6):
            lab = self.lab
            bob = lab.add_client(f"bob {steps}")
            lab.settle()
            _, results = self.dial(bob, CODE)
            lab.network.run(steps * 0.005)
            lab.kill(f"bob {steps}")
            lab.network.run(AGREE_TIMEOUT + 5)
            if self.results:
                self.assertEqual(self.results[0].peer, bob.public_key)
                return
        self.fail("he was always killed before the end")

    def test_killing_the_maker_of_a_code_at_any_message_is_reported(self) -> None:
        """Bob hears that it came to nothing, in time; once they agreed he has that."""
        outcomes = []
        for steps in range(0, 90, 6):
            lab, name = self.lab, f"alice {steps}"
            alice = lab.add_client(name)
            offer = CodeFactory(lab.network.host(name), CODE)
            offer.agreed.addErrback(lambda _: None)
            alice.listen(offer, PORT)
            lab.settle()
            _, results = self.dial(self.bob, CODE, alice)
            lab.network.run(steps * 0.005)
            lab.kill(name)
            self.run_until(lambda results=results: results)
            self.assertEqual(len(results), 1)
            outcomes.append(isinstance(results[0], Failure))
        self.assertEqual((outcomes[0], outcomes[-1]), (True, False))
