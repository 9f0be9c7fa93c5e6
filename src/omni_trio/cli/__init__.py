"""The command line: look at a pipeline file, and run prompts through it."""

from __future__ import annotations

import click

__all__ = ["main"]

# What a command does is imported when it runs, so that --help answers at once.

# click keeps the line breaks of a paragraph that begins with a backspace.
_CHECK_STATUS = """\b
Exit status:
  0  the file describes a valid pipeline
  2  it does not; stderr says "file:line: key: what is wrong"
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="omni-trio", message="%(prog)s %(version)s")
def main() -> None:
    """Run multi-stage model pipelines on vLLM under structured concurrency."""


@main.command(epilog=_CHECK_STATUS)
@click.argument("pipeline")
@click.option("--mermaid", is_flag=True, help="Print the pipeline as a Mermaid graph instead of a table.")
def check(pipeline: str, *, mermaid: bool) -> None:
    """Check the file PIPELINE (.toml or .yaml) and show what it describes.

    No engine is started and no model is loaded; bridges are imported, workers only looked for.
    """
    from ._check import check as run_check  # noqa: PLC0415 - see the top

    run_check(pipeline, mermaid=mermaid)
