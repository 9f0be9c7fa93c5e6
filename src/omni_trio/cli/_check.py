"""What ``omni-trio check`` does."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_trio.pipeline import Pipeline
from omni_trio.telemetry.mermaid import mermaid_graph

from ._status import load

__all__ = ["check"]


def check(path: str, *, mermaid: bool) -> None:
    """Load the pipeline in `path` and print it as a table or a Mermaid graph."""
    pipeline = load(path)
    if mermaid:
        click.echo(mermaid_graph(pipeline), nl=False)
    else:
        _print_table(pipeline)


def _print_table(pipeline: Pipeline) -> None:
    table = Table(title=Text(f"pipeline {pipeline.name}"), title_justify="left")
    for heading in ("stage", "kind", "model or target", "fed by", "replicas", "output"):
        table.add_column(heading, overflow="fold")
    for index, stage in enumerate(pipeline.stages):
        source, bridge = pipeline.sources[index], pipeline.bridges[index]
        if source is None or bridge is None:
            fed_by = "the prompt"
        else:
            way = "streamed through" if stage.stream else "through"
            fed_by = f"{pipeline.stages[source].name}, {way} {bridge.name}"
        replicas = str(stage.replicas)
        if stage.devices:
            groups = "; ".join(",".join(stage.device_group(replica)) for replica in range(stage.replicas))
            replicas += f" on {groups}"
        modality = pipeline.modalities[index]
        cells = (
            stage.name,
            stage.kind,
            stage.model or stage.target or "",
            fed_by,
            replicas,
            modality if pipeline.finals[index] else f"({modality})",
        )
        table.add_row(*(Text(cell) for cell in cells))
    table.caption = Text("outputs in brackets stay inside the pipeline") if not all(pipeline.finals) else None
    # A pipe has no width; the words matter more than a width that nobody set.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
