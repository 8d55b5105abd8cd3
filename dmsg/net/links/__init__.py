"""Links: connections with a handshake and then frames, encrypted by Noise or plain."""
