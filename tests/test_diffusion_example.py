"""The diffusion example: its plans, companions and pictures one by one, and the pipeline as it is run."""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from omni_trio import BridgeContext, StageInput, load_pipeline, open_runtime
from omni_trio.bridges import CompanionOutput, ExpandContext
from omni_trio.messages import Progress

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "diffusion"
sys.path.insert(0, str(FOLDER))

from picture_plan import COLOURS, SHAPES, VOCABULARY, companions, picture, plan_of, read_plan  # noqa: E402

from worker_stage import ENDLESS, opened, run  # noqa: E402

# ---- plans, companions, bridge


def test_a_plan_says_what_was_planned():
    for shape in (None, *SHAPES):
        for colour in (None, *COLOURS):
            read = read_plan(plan_of(shape, colour, "red"))
            assert read == (
                None if shape is None else SHAPES.index(shape),
                None if colour is None else COLOURS.index(colour),
                COLOURS.index("red"),
            )


@pytest.mark.parametrize("tokens", [(), (1, 2), plan_of("circle", "red", None)[::-1], (0, 0, 0)])
def test_what_is_no_plan_is_refused(tokens):
    with pytest.raises(ValueError, match=r"plan|is not one of"):
        read_plan(tokens)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A red circle on blue", {"cfg_text": "on blue", "cfg_img": "a red circle"}),
        ("a red circle", {"cfg_text": "nothing", "cfg_img": "a red circle"}),
        ("on blue", {"cfg_text": "on blue", "cfg_img": "nothing"}),
        (None, {}),
    ],
)
def test_companions_leave_out_a_part_of_the_prompt(text, expected):
    made = companions(ExpandContext(request_id="r", prompt=StageInput(text=text), params={}))
    assert {companion.role: companion.input.text for companion in made} == expected


def test_the_bridge_hands_on_all_plans():
    def output(plan: tuple[int, ...]) -> CompanionOutput:
        return CompanionOutput(request_id="c", token_ids=plan, text="", data={}, finish_reason="length")

    plans = {"cfg_text": plan_of(None, None, "blue"), "cfg_img": plan_of("circle", "red", None)}
    context = BridgeContext(
        request_id="r",
        prompt=StageInput(text="a red circle on blue"),
        source="planner",
        stage="denoiser",
        token_ids=plan_of("circle", "red", "blue"),
        text="",
        data={},
        finished=True,
        finish_reason="length",
        companions={role: output(plan) for role, plan in plans.items()},
    )
    given = picture(context)
    assert given is not None
    assert given.token_ids == plan_of("circle", "red", "blue")
    assert {role: tuple(plan.tolist()) for role, plan in given.data.items()} == plans


# ---- the denoiser, in its process


def drawing(shape: str | None, colour: str | None, ground: str | None, *, guided: bool = True) -> StageInput:
    plans = {"cfg_text": plan_of(None, None, ground), "cfg_img": plan_of(shape, colour, None)} if guided else {}
    return StageInput(
        token_ids=plan_of(shape, colour, ground), data={role: np.asarray(plan) for role, plan in plans.items()}
    )


def opened_denoiser(zygote: Any, **fields: Any):
    return opened(zygote, "denoiser:Denoiser", path=str(FOLDER), **fields)


def seen(image: np.ndarray) -> tuple[str, str, str]:
    """Say what an image shows: shape, colour and ground."""
    from denoiser import ENLARGE, PALETTE

    small = image[::ENLARGE, ::ENLARGE].astype(float) / 127.5 - 1
    distance = {name: np.square(small - colour).sum(-1) for name, colour in PALETTE.items()}
    names = np.array(list(distance))[np.argmin(np.stack(list(distance.values())), 0)]
    assert np.min(np.stack(list(distance.values())), 0).max() < 0.01, "some pixels are of no colour of the palette"
    ground = str(names[0, 0])
    (colour,) = set(names.flatten().tolist()) - {ground}
    figure = names == colour
    rows, columns = np.flatnonzero(figure.any(1)), np.flatnonzero(figure.any(0))
    box = figure[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if box.all():
        return "square", colour, ground
    if not np.array_equal(box, box[::-1]):
        return "triangle", colour, ground
    # A circle covers pi / 4 of the square around it, a cross 5 / 9.
    return ("circle" if box.mean() > 0.65 else "cross"), colour, ground


def test_every_shape_is_drawn_in_its_colours(zygote):
    pytest.importorskip("torch", reason="the denoiser is made of torch")

    async def main():
        async with opened_denoiser(zygote) as stage:
            wanted = [
                (shape, COLOURS[index], COLOURS[(index + 1 + seed) % 6])
                for seed in range(3)
                for index, shape in enumerate(SHAPES)
            ]
            for number, plan in enumerate(wanted):
                await stage.submit(f"r{number}", drawing(*plan), {"seed": number})
            await stage.until_finished(*(f"r{number}" for number in range(len(wanted))))
            for number, plan in enumerate(wanted):
                output = stage.of(f"r{number}")[-1]
                assert output.error is None
                assert output.data["image"].shape == (256, 256, 3)
                assert seen(output.data["image"]) == plan

    run(main)


def test_an_image_is_the_same_to_the_last_bit_whatever_it_is_drawn_beside(zygote):
    pytest.importorskip("torch", reason="the denoiser is made of torch")

    async def main():
        async with opened_denoiser(zygote) as stage:
            params = {"seed": 5}
            given = drawing("circle", "red", None)
            alone = (await stage.result("alone", given, params)).data["image"]
            await stage.submit("long", drawing("square", "green", "white"), ENDLESS)
            await stage.until(lambda: stage.steps("long") > 2)
            beside = (await stage.result("beside", given, params)).data["image"]
            await stage.client.abort(["long"])
            batch = StageInput(batch=(drawing("cross", None, "blue"), given))
            within = (await stage.result("within", batch, params)).data["image"][1]
            assert np.array_equal(alone, beside)
            assert np.array_equal(alone, within)
            others = [(await stage.result(f"s{seed}", given, {"seed": seed})).data["image"] for seed in range(6, 12)]
            assert len({image.tobytes() for image in others}) > 1

    run(main)


def test_guidance_comes_from_the_companions(zygote):
    pytest.importorskip("torch", reason="the denoiser is made of torch")

    async def main():
        async with opened_denoiser(zygote) as stage:

            async def image(name: str, scale: float, *, guided: bool) -> bytes:
                params = {"seed": 0, "guidance_scale": scale, "guidance_scale_img": scale}
                given = drawing("circle", "red", "blue", guided=guided)
                return (await stage.result(name, given, params)).data["image"].tobytes()

            plain = await image("plain", 1.5, guided=False)
            assert await image("one", 1, guided=True) == plain
            assert await image("more", 1.5, guided=True) != plain

    run(main)


def test_a_picture_that_can_not_be_fails_its_request_only(zygote):
    pytest.importorskip("torch", reason="the denoiser is made of torch")

    async def main():
        async with opened_denoiser(zygote) as stage:
            same = await stage.result("same", drawing("circle", "red", "red"))
            assert "no such picture: red on red" in same.error
            nonsense = await stage.result("nonsense", StageInput(token_ids=(1, 2, 3)))
            assert "is not one of" in nonsense.error
            assert seen((await stage.result("after", drawing("cross", "white", "red"))).data["image"])[0] == "cross"

    run(main)


# ---- the planner, and the whole


def test_prompts_for_training_say_what_their_plans_say():
    from make_planner import LONGEST, prompts

    for text, plan in islice(prompts(random.Random(1)), 500):
        words = text.split()
        assert 1 <= len(words) <= LONGEST
        shape, colour, ground = read_plan(plan)
        assert [word for word in words if word in SHAPES] == ([] if shape is None else [SHAPES[shape]])
        named = [COLOURS[number] for number in (colour, ground) if number is not None]
        assert [word for word in words if word in COLOURS] == named
        assert ("on" in words) == (ground is not None)
        assert set(words) <= {*VOCABULARY, "?"}


@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # what is trained with has warnings of its own
def test_what_the_prompt_asks_for_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs vLLM")
    from make_planner import make_planner

    monkeypatch.setenv("OMNI_TRIO_DIFFUSION", str(make_planner(tmp_path)))
    pipeline = load_pipeline(FOLDER / "diffusion.toml")
    prompts = {
        "Please draw a big red circle on a blue ground!": ("circle", "red", "blue"),
        "a green cross on white paper": ("cross", "green", "white"),
        "a square, yellow, on black": ("square", "yellow", "black"),
        "one white triangle on green": ("triangle", "white", "green"),
    }
    results: dict[str, Any] = {}
    progress: list[tuple[int, int]] = []

    async def main() -> None:
        with trio.fail_after(300):
            async with open_runtime(pipeline) as runtime:

                async def ask(prompt: str) -> None:
                    results[prompt] = await runtime.generate(prompt, sampling_params={"denoiser": {"seed": 1}})

                async with trio.open_nursery() as nursery:
                    for prompt in prompts:
                        nursery.start_soon(ask, prompt)
                async with runtime.request("a circle") as request:
                    async for event in request:
                        if isinstance(event, Progress):
                            progress.append((event.step, event.total))

    trio.run(main)
    for prompt, wanted in prompts.items():
        assert results[prompt]["planner"].text.split() == [f"<{word}>" for word in wanted]
        assert seen(results[prompt]["denoiser"].value) == wanted
    # The newest takes the place of one that nobody has read yet.
    assert progress == sorted(set(progress))
    assert progress
    assert {total for _, total in progress} == {20}
