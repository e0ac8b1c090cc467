"""The server's side: serving a run, its nodes, and pulling their replies."""
