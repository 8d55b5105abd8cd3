"""Common part of the clients of all protocol families: finds servers, stays connected to them, and posts the client's
entry to discovery.
"""
