"""Reachability checks of listed servers: which servers are checked, when, and how much load the checks may put on other
machines.
"""
