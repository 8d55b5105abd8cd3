"""Common part of the servers of all protocol families: accepts and admits clients, registers the server in discovery,
and shuts it down in order.
"""
