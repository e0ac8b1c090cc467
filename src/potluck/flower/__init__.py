"""Clients on other machines: Flower carries the messages, everything else is as in process (extra `flower`)."""
