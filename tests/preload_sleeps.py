"""A preload that takes far longer than any test."""

import time

time.sleep(600)
