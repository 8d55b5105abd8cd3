"""One agent for all: dmsg up, status, down."""
