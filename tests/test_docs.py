"""The documentation is true: its programs run, its links lead somewhere, and nothing that exists is left out.

How code stands in a page (README.md and docs/):

* ```` ```python ```` is a whole program: it is run, as a reader would run it, and must not warn.
* ```` ```python title="name.py" ```` the same, from a file of that name; other blocks of the page may import it.
* ```` ```toml title="name.toml" ```` (or any other language) is a file that the programs of the page find.
* ```` ```text title="Output" ```` is what the program or the commands just above print; ``...`` stands for anything.
* ```` ```console ```` are commands, each after a ``$``: those of ``omni-trio`` and ``python`` are run.
* ```` ```py ```` is a fragment: it must be valid Python.
* ```` ```sh ```` is for a reader's eyes.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest

import omni_trio
from omni_trio import errors, messages
from omni_trio.cli import main as cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=fence)`* *$",
    re.DOTALL | re.MULTILINE,
)


@attrs.frozen
class Block:
    language: str
    title: str
    body: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', match["info"])
        body = "".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines(keepends=True))
        yield Block(match["language"], title[1] if title else "", body, text.count("\n", 0, match.start()) + 1)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


# --------------------------------------------------------------------------------------------------------------
# Programs run


def has_programs(page: Path) -> bool:
    return any(block.language in ("python", "console") for block in blocks(page.read_text(encoding="utf-8")))


def execute(command: list[str], folder: Path) -> str:
    # What a reader has: neither the page's folder nor anything else is on the path by our doing.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def commands(block: Block, where: str) -> Iterator[list[str]]:
    for line in block.body.splitlines():
        assert line.startswith("$ "), f"{where}: a console block has nothing but commands, each after '$ '"
        words = shlex.split(line.removeprefix("$ "))
        if words[0] == "omni-trio":
            # As the installed command runs: without the working directory on the path (-P).
            program = "from omni_trio.cli import main; main(prog_name='omni-trio')"
            yield [sys.executable, "-P", "-c", program, *words[1:]]
        else:
            assert words[0] == "python", f"{where}: put what is not to be run into a block of 'sh'"
            yield [sys.executable, *words[1:]]


@pytest.mark.parametrize("page", [page for page in PAGES if has_programs(page)], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path):
    printed: str | None = None
    for number, block in enumerate(blocks(page.read_text(encoding="utf-8"))):
        where = f"{page.name}:{block.line}"
        if block.title == "Output":
            assert printed is not None, f"{where}: nothing above has printed this"
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            checker = doctest.OutputChecker()
            assert checker.check_output(block.body, printed, flags), f"{where}: printed was\n{printed}"
            continue
        printed = None
        if block.title:
            (tmp_path / block.title).write_text(block.body, encoding="utf-8")
        if block.language == "python":
            program = tmp_path / (block.title or f"block_{number}.py")
            program.write_text(block.body, encoding="utf-8")
            printed = execute([sys.executable, program.name], tmp_path)
        elif block.language == "console":
            printed = "".join(execute(command, tmp_path) for command in commands(block, where))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_fragments_are_valid_python_and_toml(page: Path):
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "py":
            compile(block.body, f"{page.name}:{block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "toml":
            tomllib.loads(block.body)


def test_the_readme_shows_a_program():
    assert any(block.language == "python" for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")))


# --------------------------------------------------------------------------------------------------------------
# Links and paths lead somewhere

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:href|src|srcset)=\"([^\"]+)\"")


def slug(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", words.lower()).strip())


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)}
    return headings | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_what_exists(page: Path):
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        link = match[1] or match[2]
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_a_page_names_exist(page: Path):
    named = re.findall(
        r"`((?:src|tests|property_tests|benchmarks|examples|scripts)/[\w./-]+)`", page.read_text(encoding="utf-8")
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [str(page.relative_to(DOCS)) for page in PAGES[1:] if f" {page.relative_to(DOCS)}\n" not in navigation]
    assert not missing


# --------------------------------------------------------------------------------------------------------------
# Nothing is left out


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["routing_diagram.py", "pipeline_keys.py"])
def test_generated_parts_are_up_to_date(script: str):
    execute([sys.executable, str(ROOT / "scripts" / script), "--check"], ROOT)


def test_every_key_of_a_stage_is_documented():
    page = text_of("reference/pipeline-file.md")
    missing = [field.name for field in attrs.fields(omni_trio.StageSpec) if f"| `{field.name}` |" not in page]
    assert not missing


def test_every_error_is_in_the_table_of_what_to_do():
    page = text_of("how-to/handle-errors.md")
    concrete = set(errors.__all__) - {"OmniTrioError", "RequestError"}
    missing = [name for name in sorted(concrete) if f"| `{name}` |" not in page]
    assert not missing


def test_every_command_and_option_is_documented():
    page = text_of("reference/command-line.md")
    assert isinstance(cli, click.Group)
    for name, command in cli.commands.items():
        assert f"## `omni-trio {name}`" in page
        options = [option for p in command.params if isinstance(p, click.Option) for option in p.opts]
        missing = [option for option in options if f"`{option}" not in page]
        assert not missing, name


def test_every_event_of_the_trace_is_documented_and_no_other():
    page = text_of("reference/events.md")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    emitted = set(re.findall(r"""(?:emit|trace_leg|trace_bridge)\(\s*"([a-z]+\.[a-z]+)""", sources))
    emitted |= {f"request.{verdict}" for verdict in ("finished", "failed", "aborted", "expired")}
    # The legs of companions have names of their own, except that they are never updated.
    legs = {name for name in emitted if name.startswith("leg.")} - {"leg.updated"}
    emitted |= {name.replace("leg.", "companion.") for name in legs}
    assert emitted
    assert set(re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", page, re.MULTILINE)) == emitted


@pytest.mark.parametrize(
    ("struct", "page"),
    [
        (messages.StageMetrics, "reference/metrics.md"),
        (messages.Output, "reference/events.md"),
        (messages.Progress, "reference/events.md"),
        (messages.TraceEvent, "reference/events.md"),
    ],
)
def test_every_field_is_documented(struct: type, page: str):
    text = text_of(page)
    assert not [field for field in struct.__struct_fields__ if f"| `{field}` |" not in text]


def test_every_public_name_is_in_the_api_reference():
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("api*.md"))
    missing = []
    for name in omni_trio.__all__:
        home = inspect.getmodule(getattr(omni_trio, name))
        assert home is not None
        modules = [home.__name__, home.__name__.rpartition(".")[0], "omni_trio"]
        if not any(f"::: {module}.{name}\n" in pages or f"::: {module}\n" in pages for module in modules):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("number", range(1, 17))
def test_every_invariant_says_which_tests_show_it(number: int):
    page = text_of("explanation/guarantees.md")
    section = re.search(rf"^### I{number} .*?(?=^##)", page + "\n## end", re.DOTALL | re.MULTILINE)
    assert section is not None
    assert re.search(r"`(?:tests|property_tests)/test_\w+\.py`", section[0])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_pages_name_no_place_outside_of_the_repository(page: Path):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/(?:work|root|home)/", text)
    assert "TODO" not in without_code(text)
