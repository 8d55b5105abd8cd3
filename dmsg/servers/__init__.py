"""Common part of the servers of all protocol families: listening, admission of clients, registration in discovery, and
orderly shutdown."""
