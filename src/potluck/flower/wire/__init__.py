"""What messages between server and nodes look like, and what is refused."""
