"""Instruments and pictures: what happened in a run, and when.

A `Recorder` given to ``open_runtime(..., instruments=[recorder])`` keeps the events; `timeline_svg` draws them,
`write_chrome_trace` writes them for Perfetto. `mermaid_graph` shows a pipeline that has not run yet.
"""

from __future__ import annotations

from .chrome_trace import write_chrome_trace
from .mermaid import mermaid_graph
from .recorder import Recorder
from .timeline import timeline_svg

__all__ = ["Recorder", "mermaid_graph", "timeline_svg", "write_chrome_trace"]
