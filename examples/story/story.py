"""Tell a story: SmolLM2 writes it, the voice "Joe" reads it, both at the same time.

    python examples/story/story.py "Tell me about a fox and the moon." --out out/story

Writes ``story.txt``, ``story.wav``, ``timeline.svg`` and ``trace.json`` (for any viewer of Chrome traces).
"""

from __future__ import annotations

import time
import wave
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
import trio
from storyteller.models import prepare_smollm2

import omni_trio
from omni_trio.telemetry import Recorder, timeline_svg, write_chrome_trace

HERE = Path(__file__).resolve().parent
PROMPT = "Tell me a short story about a lighthouse keeper and a gull."


@attrs.define
class Story:
    """What was told, and when. Times in seconds since the request was made."""

    text: str = ""
    audio: list[Any] = attrs.field(factory=list)
    sample_rate: int = 0
    first_token: float = 0.0
    first_audio: float = 0.0
    last: float = 0.0

    @property
    def words(self) -> int:
        """How many words were written."""
        return len(self.text.split())

    @property
    def seconds(self) -> float:
        """How long the reading takes."""
        return sum(piece.size for piece in self.audio) / self.sample_rate if self.sample_rate else 0.0


async def tell(pipeline: omni_trio.Pipeline, prompt: str, recorder: Recorder) -> tuple[Story, float]:
    """Run the pipeline once, showing the text as it comes.

    Returns:
        The story, and the seconds that bringing the engines up took.
    """
    story = Story()
    began = trio.current_time()
    async with omni_trio.open_runtime(pipeline, instruments=[recorder]) as runtime:
        up = trio.current_time()
        async with runtime.request(prompt) as request:
            async for event in request:
                now = trio.current_time() - up
                if isinstance(event, omni_trio.Output) and event.stage == "thinker" and event.text:
                    story.first_token = story.first_token or now
                    story.text += event.text
                    click.echo(event.text, nl=False)
                elif isinstance(event, omni_trio.Output) and event.stage == "speaker" and "audio" in event.data:
                    story.first_audio = story.first_audio or now
                    story.audio.append(event.data["audio"])
                    story.sample_rate = event.data["sample_rate"]
                story.last = now
    return story, up - began


def write_wav(path: Path, story: Story) -> None:
    """Write what was read as 16-bit mono."""
    samples = np.concatenate([*story.audio, np.zeros(0, np.float32)])
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(story.sample_rate or 22_050)
        file.writeframes((samples * 32_767).astype("<i2").tobytes())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("prompt", default=PROMPT)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/story"), show_default=True)
def main(prompt: str, out: Path) -> None:
    """Let a language model tell a story about PROMPT, and a voice read it aloud."""
    start = time.monotonic()
    prepare_smollm2()
    pipeline = omni_trio.load_pipeline(HERE / "story.toml")
    recorder = Recorder()
    click.secho(f"{prompt}\n", bold=True)
    story, start_up = trio.run(tell, pipeline, prompt, recorder)

    out.mkdir(parents=True, exist_ok=True)
    (out / "story.txt").write_text(story.text + "\n", encoding="utf-8")
    write_wav(out / "story.wav", story)
    (out / "timeline.svg").write_text(timeline_svg(recorder, pipeline=pipeline, title=prompt), encoding="utf-8")
    write_chrome_trace(recorder, out / "trace.json", pipeline=pipeline)
    click.echo(
        f"\n\n{story.words} words and {story.seconds:.1f} s of audio in {story.last:.1f} s: "
        f"first token after {story.first_token * 1000:.0f} ms, first audio after {story.first_audio:.1f} s "
        f"(engines up in {start_up:.1f} s, {time.monotonic() - start:.1f} s in all)"
    )
    click.echo(f"{out}: " + ", ".join(sorted(path.name for path in out.iterdir())))


if __name__ == "__main__":
    main()
