"""Links: connections between client and server that begin with a handshake and then carry frames, encrypted or
plain."""
