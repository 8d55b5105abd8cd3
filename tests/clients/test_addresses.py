"""Names and keys as people write them."""

from pathlib import Path

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import URI

from dmsg import DmsgAddress, DmsgClientEndpoint, DmsgEndpointFactory
from dmsg.clients.address_book import AddressBook, NoSuchName, UnknownName
from dmsg.errors import CloseReason, ConnectFailed
from dmsg.keys import SecKey
from dmsg.servers.admission import read_keys

KEY = SecKey.from_seed(b"names").public


class Opener:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def connect(self, remote: object, factory: object, port: int = 0, *, timeout: float = 10.0) -> object:
        self.asked.append((DmsgAddress.of(remote, port), timeout))  # type: ignore[arg-type]
        return None


class FormsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.names = AddressBook(Path(self.mktemp()))
        self.names.add("bob", KEY)

    def test_keys_in_either_form_are_found_in_the_book(self) -> None:
        for text in (KEY.text, KEY.text.upper(), str(KEY), "bob", "BOB"):
            self.assertEqual(self.names.find(text), KEY)
            self.assertEqual(self.names.find_host(text), KEY)
            self.assertEqual(self.names.find_host(f"{text}.dmsg"), KEY)
        self.assertEqual(self.names.find_host(f"{str(KEY)[:30]}.{str(KEY)[30:]}.dmsg"), KEY)

    def test_a_book_may_hold_either_form(self) -> None:
        self.names.path.write_text(f"alice {KEY.text}\nbob {KEY}\n")
        self.assertEqual(self.names.all(), {"alice": KEY, "bob": KEY})

    def test_a_key_is_no_name(self) -> None:
        with self.assertRaisesRegex(UnknownName, "is a public key"):
            self.names.add(KEY.text, KEY)

    def test_text_that_is_neither_name_nor_key_is_refused(self) -> None:
        with self.assertRaisesRegex(NoSuchName, r"neither a public key \(53 characters\) nor a name in"):
            self.names.find("carol")

    @given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567", min_size=53, max_size=53))
    def test_text_like_a_key_is_parsed_as_key_or_name(self, text: str) -> None:
        try:
            self.assertEqual(self.names.find(text).text, text)
        except UnknownName:
            pass

    def test_lists_of_servers_take_either_form(self) -> None:
        path = self.mktemp()
        Path(path).write_text(f"{KEY.text}  # bob\n{SecKey.from_seed(b'x').public}\n")
        self.assertEqual(len(read_keys(path)), 2)


class AddressTests(SynchronousTestCase):
    def test_host_and_port(self) -> None:
        address = DmsgAddress(KEY, 80)
        self.assertEqual((address.host, address.port), (KEY.text, 80))
        self.assertEqual((address.text, address.short), (f"{KEY.text}:80", f"{KEY.short}:80"))
        self.assertEqual(DmsgAddress(KEY).text, KEY.text)

    def test_port_comes_before_the_time_out(self) -> None:
        opener = Opener()
        for endpoint in (
            DmsgClientEndpoint(opener, KEY, 80),  # type: ignore[arg-type]
            DmsgClientEndpoint(opener, DmsgAddress(KEY, 80), timeout=3),  # type: ignore[arg-type]
        ):
            endpoint.connect(None)  # type: ignore[arg-type]
        self.assertEqual(opener.asked, [(DmsgAddress(KEY, 80), 10.0), (DmsgAddress(KEY, 80), 3)])

    def test_a_time_out_in_place_of_a_port_is_said(self) -> None:
        for wrong, kind, why in (
            (10.0, TypeError, "timeout=SECONDS"),
            (True, TypeError, "port is an int"),
            (65536, ValueError, "0 to 65535"),
            (-1, ValueError, "0 to 65535"),
        ):
            with self.assertRaisesRegex(kind, why):
                DmsgClientEndpoint(Opener(), KEY, wrong)  # type: ignore[arg-type]
        with self.assertRaises(TypeError):
            DmsgClientEndpoint(Opener(), KEY, 80, 10.0)  # type: ignore[arg-type, call-arg]
        with self.assertRaisesRegex(ValueError, "names port 80, the argument 81"):
            DmsgAddress.of(DmsgAddress(KEY, 80), 81)

    def test_hosts_of_urls(self) -> None:
        opener = Opener()
        factory = DmsgEndpointFactory(opener, timeout=5)  # type: ignore[arg-type]
        for url in (f"http://{KEY.text}/x", f"http://{KEY.text}.dmsg:80/", f"http://{KEY}/"):
            factory.endpointForURI(URI.fromBytes(url.encode())).connect(None)  # type: ignore[arg-type]
        self.assertEqual(opener.asked, [(DmsgAddress(KEY, 80), 5)] * 3)
        with self.assertRaises(UnknownName):
            factory.endpointForURI(URI.fromBytes(b"http://www.example.org/"))


class ErrorTests(SynchronousTestCase):
    def test_a_reason_common_to_all_servers_is_named_once(self) -> None:
        text = "nobody listens at 02ab:80, or not for this key"
        error = ConnectFailed(text, (("03cd", text), ("02ef", text)), str(KEY))
        self.assertEqual(str(error), f"{text} (asked through server 03cd, 02ef)")
        error = ConnectFailed("not reached", (("03cd", "took too long"), ("02ef", "is full")))
        self.assertEqual(str(error), "not reached (through server 03cd: took too long; through server 02ef: is full)")

    def test_reasons_name_the_refusing_server(self) -> None:
        from dmsg.errors import close_reason_text

        self.assertEqual(close_reason_text(CloseReason.NOT_ADMITTED), "the server does not admit this key")
