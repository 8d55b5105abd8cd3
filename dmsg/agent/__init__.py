"""Agent (``dmsg up``): a process that keeps a key and its connections for all programs of this user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmsg.lazily import public

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "dmsg.agent.client": "AgentClient",
        "dmsg.agent.socket_path": "AgentError FoundAgent find_agent",
    },
)

if TYPE_CHECKING:
    from dmsg.agent.client import AgentClient as AgentClient
    from dmsg.agent.socket_path import AgentError as AgentError, FoundAgent as FoundAgent, find_agent as find_agent
