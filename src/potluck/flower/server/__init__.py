"""The server's side: serving a run, its grid of nodes, what it pulls from them."""
