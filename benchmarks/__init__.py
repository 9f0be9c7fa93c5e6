"""What the runtime costs: measured beside what nobody can beat, and beside vLLM's own front end."""
