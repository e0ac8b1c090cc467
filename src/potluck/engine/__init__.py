"""The engine runs methods: it interprets `cohort.ask` and `yield Fit`, and knows no particular method."""
