"""What a user asks for, read, checked and explained."""
