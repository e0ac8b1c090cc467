"""The format of messages between server and nodes, and the checks on them."""
