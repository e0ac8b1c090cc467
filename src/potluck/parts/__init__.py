"""Building blocks of methods: pieces with two users, and pieces of mathematics that deserve their own tests."""
