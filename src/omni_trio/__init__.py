"""omni_trio."""
