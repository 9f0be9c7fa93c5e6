"""A small language model tells a story, and a voice reads it aloud while it is still being written."""
