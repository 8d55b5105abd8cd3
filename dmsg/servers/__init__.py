"""Servers of any protocol family: listening, admission, registration and draining."""
