"""Networking on Twisted that knows no protocol family: links, streams, web sites, timers and limits."""
