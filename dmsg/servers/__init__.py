"""What a server of any family does: listen, admit, register, leave."""
