"""Who is told while a run goes on."""
