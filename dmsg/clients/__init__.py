"""Common part of the clients of all protocol families: finds servers, keeps connections to them, and posts the client's
entry to discovery."""
