"""The command line: look at a pipeline file, and run prompts through it."""

from __future__ import annotations

from typing import Any

import click

from . import _status

__all__ = ["main"]

# What a command does is imported when it runs, so that --help answers at once.

# click keeps the line breaks of a paragraph that begins with a backspace.
_CHECK_STATUS = """\b
Exit status:
    0  the file describes a valid pipeline
    1  it does, but stdout can not be written to
    2  it does not; stderr says "file:line: key: what is wrong"
  130  interrupted with Ctrl-C
"""
_RUN_STATUS = """\b
Exit status:
    0  all went well
    1  a request failed, a line of the input is no prompt, or a result can not be kept; the others
       were served. Or: stdout, the folder or a picture can not be written
    2  the command line or the pipeline file is wrong; nothing was started
    3  an engine did not come up, or died
  130  interrupted with Ctrl-C (143: with SIGTERM); all engines are down again
  141  whoever read stdout has left; all engines are down again

\b
Input, one JSON object per line:
  {"prompt": "Tell me a story"}
  {"prompt": [1, 2, 3], "request_id": "a", "deadline": 10}
  {"prompt": "...", "sampling_params": {"thinker": {"max_tokens": 64}}}
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _above_zero(_context: click.Context, _option: click.Parameter, seconds: float | None) -> float | None:
    # Not click's FloatRange, which lets "nan" through.
    if seconds is not None and not seconds > 0:
        raise click.BadParameter(f"expected a number of seconds above 0, not {seconds:g}")
    return seconds


class _Program(click.Group):
    """The commands, which end with 130 on Ctrl-C wherever it meets them: in the imports, too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_status.INTERRUPTED)


@click.group(cls=_Program, context_settings=_CONTEXT)
@click.version_option(package_name="omni-trio", message="%(prog)s %(version)s")
def main() -> None:
    """Run multi-stage model pipelines on vLLM under structured concurrency."""
    from ._streams import set_up  # noqa: PLC0415 - see above

    set_up()


@main.command(epilog=_CHECK_STATUS)
@click.argument("pipeline")
@click.option("--mermaid", is_flag=True, help="Print nothing but the Mermaid graph.")
def check(pipeline: str, *, mermaid: bool) -> None:
    """Check the file PIPELINE (.toml or .yaml) and show what it describes, as a table and as a Mermaid graph.

    No engine is started and no model is loaded. Bridges are imported; a worker's target is looked for in the source
    of its module. What only an engine can know is left to it, such as the names of its arguments.
    """
    from ._check import check as run_check  # noqa: PLC0415 - see the top

    run_check(pipeline, mermaid=mermaid)


@main.command(epilog=_RUN_STATUS)
@click.argument("pipeline")
@click.argument("prompt", required=False)
@click.option(
    "--input",
    "input_",
    metavar="FILE",
    help="Prompts as JSON Lines; '-' reads stdin, to its end, before anything starts.",
)
@click.option("--out", metavar="DIR", help="Folder for results.jsonl and files: .wav, .txt, .npy, .png.")
@click.option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
@click.option("--timeline", metavar="FILE.svg", help="Draw the run as a picture.")
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--deadline", type=float, callback=_above_zero, metavar="SECONDS", help="Give a request up after this (above 0)."
)
@click.option("--param", "params", multiple=True, metavar="STAGE.KEY=VALUE", help="Sampling parameter; repeatable.")
@click.option("-q", "--quiet", "--no-progress", "quiet", is_flag=True, help="Say nothing but results and errors.")
def run(
    *,
    pipeline: str,
    prompt: str | None,
    input_: str | None,
    out: str | None,
    trace: str | None,
    timeline: str | None,
    concurrency: int,
    deadline: float | None,
    params: tuple[str, ...],
    quiet: bool,
) -> None:
    """Start the engines of the file PIPELINE, run PROMPT or the prompts of a file through it, and stop them again.

    The text that answers a PROMPT appears on stdout as it is made. Results of a file go to stdout as JSON Lines,
    or to results.jsonl in the folder that --out names.
    """
    if (prompt is None) == (input_ is None):
        raise click.UsageError("give either a PROMPT or --input FILE")
    from ._run import Options  # noqa: PLC0415 - see the top
    from ._run import run as run_pipeline  # noqa: PLC0415 - see the top

    run_pipeline(
        Options(
            pipeline=pipeline,
            prompt=prompt,
            input=input_,
            out=out,
            trace=trace,
            timeline=timeline,
            concurrency=concurrency,
            deadline=deadline,
            params=params,
            quiet=quiet,
        )
    )
