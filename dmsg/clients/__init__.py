"""Clients of any protocol family: finding servers, staying connected, and being found in discovery."""
