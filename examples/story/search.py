"""Find the sentences of a story that are nearest to a question: many requests at once on a pooling stage.

python examples/story/search.py "Who looks after the light?" --file out/story/story.txt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import trio
from storyteller.models import prepare_minilm
from storyteller.sentences import split

import omni_trio

HERE = Path(__file__).resolve().parent


async def embed(pipeline: omni_trio.Pipeline, texts: list[str]) -> Any:
    """Return one vector per text: an array of shape [texts, 384], each row of length 1."""
    vectors: dict[int, Any] = {}

    async with omni_trio.open_runtime(pipeline) as runtime:

        async def embed_one(index: int) -> None:
            result = await runtime.generate(texts[index])
            vectors[index] = result["embedder"].value

        async with trio.open_nursery() as nursery:
            for index in range(len(texts)):
                nursery.start_soon(embed_one, index)
    return np.stack([vectors[index] for index in range(len(texts))])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("question", default="Who looks after the light?")
@click.option("--file", type=click.Path(path_type=Path, exists=True), default=Path("out/story/story.txt"))
@click.option("--show", default=3, show_default=True, help="How many sentences to show.")
def main(question: str, file: Path, show: int) -> None:
    """Show the sentences of a text that are nearest to QUESTION in meaning."""
    prepare_minilm()
    pipeline = omni_trio.load_pipeline(HERE / "embed.toml")
    sentences = split(file.read_text(encoding="utf-8"))
    vectors = trio.run(embed, pipeline, [question, *sentences])
    likeness = vectors[1:] @ vectors[0]
    click.secho(question, bold=True)
    for index in np.argsort(-likeness)[:show]:
        click.echo(f"{likeness[index]:.2f}  {sentences[index]}")


if __name__ == "__main__":
    main()
