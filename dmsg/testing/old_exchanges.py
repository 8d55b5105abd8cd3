"""Exchanges of programs of 2019, as they were recorded: the frames between two clients and their server, in order.

A line contains the sender and the receiver of a frame (``A`` and ``B`` are the clients, ``S`` is the server), its type
and its transport id in hexadecimal digits, and its payload. ``{A}`` and ``{B}`` stand for the public keys.
"""

from __future__ import annotations

EXCHANGES: dict[str, str] = {
    "session_basic": """
S->B 00 0000
S->A 00 0000
A->S 01 0200 {A}{B}
S->B 01 0301 {A}{B}
B->S 02 0301 {A}{B}
S->A 02 0200 {A}{B}
A->S 0a 0200 10006120746f20622030
S->B 0a 0301 10006120746f20622030
B->S 0b 0301 1000
S->A 0b 0200 1000
A->S 0a 0200 10016120746f20622031
S->B 0a 0301 10016120746f20622031
B->S 0b 0301 1001
S->A 0b 0200 1001
A->S 0a 0200 10026120746f20622032
S->B 0a 0301 10026120746f20622032
B->S 0b 0301 1002
S->A 0b 0200 1002
B->S 0a 0301 20006220746f20612030
S->A 0a 0200 20006220746f20612030
A->S 0b 0200 2000
S->B 0b 0301 2000
B->S 0a 0301 20016220746f20612031
S->A 0a 0200 20016220746f20612031
A->S 0b 0200 2001
S->B 0b 0301 2001
B->S 0a 0301 20026220746f20612032
S->A 0a 0200 20026220746f20612032
A->S 0b 0200 2002
S->B 0b 0301 2002
A->S 03 0200 00
S->B 03 0301 00
""",
    "session_wraps": """
S->B 00 0000
S->A 00 0000
A->S 01 fffe {A}{B}
S->B 01 ffff {A}{B}
B->S 02 ffff {A}{B}
S->A 02 fffe {A}{B}
A->S 0a fffe fffe6120746f20622030
S->B 0a ffff fffe6120746f20622030
B->S 0b ffff fffe
S->A 0b fffe fffe
A->S 0a fffe ffff6120746f20622031
S->B 0a ffff ffff6120746f20622031
B->S 0b ffff ffff
S->A 0b fffe ffff
A->S 0a fffe 00006120746f20622032
S->B 0a ffff 00006120746f20622032
B->S 0b ffff 0000
S->A 0b fffe 0000
B->S 0a ffff ffff6220746f20612030
S->A 0a fffe ffff6220746f20612030
A->S 0b fffe ffff
S->B 0b ffff ffff
B->S 0a ffff 00006220746f20612031
S->A 0a fffe 00006220746f20612031
A->S 0b fffe 0000
S->B 0b ffff 0000
B->S 0a ffff 00016220746f20612032
S->A 0a fffe 00016220746f20612032
A->S 0b fffe 0001
S->B 0b ffff 0001
B->S 03 ffff 00
S->A 03 fffe 00
""",
    "session_ids_after_wrap": """
S->B 00 0000
S->A 00 0000
A->S 01 fffe {A}{B}
S->B 01 ffff {A}{B}
B->S 02 ffff {A}{B}
S->A 02 fffe {A}{B}
A->S 01 0000 {A}{B}
S->B 01 0001 {A}{B}
B->S 02 0001 {A}{B}
S->A 02 0000 {A}{B}
A->S 01 0002 {A}{B}
S->B 01 0003 {A}{B}
B->S 02 0003 {A}{B}
S->A 02 0002 {A}{B}
""",
    "session_self_dial": """
S->A 00 0000
A->S 01 0100 {A}{A}
S->A 01 0301 {A}{A}
A->S 02 0301 {A}{A}
S->A 02 0100 {A}{A}
A->S 0a 0100 100073656c66
S->A 0a 0301 100073656c66
A->S 0b 0301 1000
S->A 0b 0100 1000
A->S 03 0301 00
S->A 03 0100 00
""",
    "session_reject_unknown_responder": """
S->A 00 0000
A->S 01 0100 {A}02ad4874d9948b4a5695d5ddf2200894688da93fd1bf3833f7e7f66a462a617cc9
S->A 03 0100 00
""",
    "request_accept": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
B->S 02 2001 {A}{B}
S->A 02 0010 {A}{B}
""",
    "request_wrong_initiator": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 02ad4874d9948b4a5695d5ddf2200894688da93fd1bf3833f7e7f66a462a617cc9{B}
S->A 03 0010 00
""",
    "request_bad_length": """
S->B 00 0000
S->A 00 0000
A->S 01 0010
S->A 03 0010 00
A->S 01 0010 {A}
S->A 03 0010 00
A->S 01 0010 {A}024d7955f33004d52705fe322fd62017fc0cd74476da6093bd2ac140be78bbcc
S->A 03 0010 00
A->S 01 0010 {A}{B}00
S->A 03 0010 00
A->S 01 0010 {A}{B}{A}{B}
S->A 03 0010 00
""",
    "unknown_transport_id": """
S->B 00 0000
S->A 00 0000
A->S 0a 0020 0001
S->A 03 0020 00
A->S 0b 0020 0001
S->A 03 0020 00
A->S 02 0020 0001
S->A 03 0020 00
A->S 03 0020 0001
S->A 03 0020 00
""",
    "request_self": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{A}
S->A 01 2001 {A}{A}
""",
    "close_payloads": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
B->S 02 2001 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010
S->B 03 2001
B->S 0a 2001 00016c617465
S->B 03 2001 00
B->S 03 2001 00
S->B 03 2001 00
A->S 01 0010 {A}{B}
S->B 01 2003 {A}{B}
B->S 02 2003 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010 07
S->B 03 2003 07
B->S 0a 2003 00016c617465
S->B 03 2003 00
B->S 03 2003 00
S->B 03 2003 00
A->S 01 0010 {A}{B}
S->B 01 2005 {A}{B}
B->S 02 2005 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010 0102030405
S->B 03 2005 0102030405
B->S 0a 2005 00016c617465
S->B 03 2005 00
B->S 03 2005 00
S->B 03 2005 00
""",
    "responder_refuses": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
B->S 03 2001 03
S->A 03 0010 03
A->S 0a 0010 00016c617465
S->A 03 0010 00
""",
    "fwd_before_accept": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
A->S 0a 0010 00016561726c79
S->B 0a 2001 00016561726c79
""",
    "payloads_are_not_checked": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
B->S 02 2001 616e797468696e67
S->A 02 0010 616e797468696e67
A->S 02 0010 {A}{B}
S->B 02 2001 {A}{B}
A->S 0a 0010
S->B 0a 2001
A->S 0a 0010 01
S->B 0a 2001 01
A->S 0b 0010 0102030405
S->B 0b 2001 0102030405
""",
    "assigned_ids": """
S->B 00 0000
S->A 00 0000
A->S 01 0000 {A}{B}
S->B 01 fffd {A}{B}
A->S 01 0002 {A}{B}
S->B 01 ffff {A}{B}
A->S 01 0004 {A}{B}
S->B 01 0001 {A}{B}
A->S 01 0006 {A}{B}
S->B 01 0003 {A}{B}
""",
    "assigned_ids_reuse": """
S->B 00 0000
S->A 00 0000
A->S 01 0010 {A}{B}
S->B 01 2001 {A}{B}
B->S 02 2001 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010 00
S->B 03 2001 00
A->S 01 0010 {A}{B}
S->B 01 2003 {A}{B}
B->S 02 2003 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010 00
S->B 03 2003 00
A->S 01 0010 {A}{B}
S->B 01 2005 {A}{B}
B->S 02 2005 {A}{B}
S->A 02 0010 {A}{B}
A->S 03 0010 00
S->B 03 2005 00
""",
}
"""Recorded exchanges of frames, by name."""
RUDE_EXCHANGES = frozenset({"request_bad_length", "request_wrong_initiator"})
"""Names of the exchanges in which a client breaks the protocol, so that its server counts a fault of the client."""
