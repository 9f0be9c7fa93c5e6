"""What is wrong with a pipeline file, and on which line."""

from __future__ import annotations

import pytest

from config_files import (
    MODES,
    NEAR,
    PAIR,
    STORY,
    failure,
    own_modules,  # noqa: F401 - in use by all tests here
)
from omni_trio.config import load_pipeline
from omni_trio.config._lines import TomlLines
from omni_trio.errors import ConfigError

# Files that can not be read


def test_files_that_are_none(tmp_path):
    for name, words in [("none.toml", "no such file"), ("p.json", "'.json'"), ("p", "''"), ("", "folder")]:
        with pytest.raises(ConfigError, match=words) as caught:
            load_pipeline(tmp_path / name)
        assert caught.value.file == str(tmp_path / name)
        assert caught.value.line is None
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="this is a folder"):
        load_pipeline(folder)


def test_a_loop_of_links_can_not_be_read(tmp_path):
    path = tmp_path / "p.toml"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="can not be read"):
        load_pipeline(path)


@pytest.mark.parametrize("name", ["p.toml", "p.yaml"])
@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file(tmp_path, name, text):
    error = failure(tmp_path, text, name)
    assert "the file is empty" in error.message
    assert error.line == 1


def test_a_yaml_file_of_comments_is_empty(tmp_path):
    assert "the file is empty" in failure(tmp_path, "# nothing\n", "p.yaml").message


@pytest.mark.parametrize("name", ["p.toml", "p.yaml"])
def test_bytes_that_are_no_text(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"# one\n# two\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="not text in UTF-8") as caught:
        load_pipeline(path)
    assert caught.value.line == 3


# Syntax


def test_toml_syntax_errors_have_a_line(tmp_path):
    error = failure(tmp_path, 'name = "x"\n\nkind = = 3\n')
    assert error.line == 3
    assert error.message == "this is not valid TOML: Invalid value"
    assert "at line" not in str(error)


def test_toml_that_ends_too_early(tmp_path):
    error = failure(tmp_path, 'name = "x"\nstages = [\n\n')
    assert error.line == 2


def test_toml_keys_given_twice(tmp_path):
    assert failure(tmp_path, 'name = "x"\n\nname = "y"\n').line == 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name: a\nstages: [1, 2\n", 3, "expected"),
        ("name: a\n\tb: c\n", 2, "tab|cannot start"),
        ("name: a\n---\nname: b\n", 2, "single document"),
        ("name: a\nstages: *nowhere\n", 2, "undefined alias"),
        ("name: a\nstages: !!python/name:os.system x\n", 2, "python/name"),
        ("name: a\n\nname: b\n", 3, "'name' is given twice, first on line 1"),
        ("name: a\nstages:\n- name: b\n  options: {x: 1, x: 2}\n", 4, "given twice"),
        ("name: a\nstages: &s [*s]\n", 2, "contains itself"),
        ("name: a\nstages: &s\n- name: b\n  options: *s\n", 2, "contains itself"),
        ("name: a\nstages: !!int ''\n", 2, "'' is no valid int"),
        ("name: a\nstages: !!bool maybe\n", 2, "'maybe' is no valid bool"),
        ("name: a\nstages: 2001-99-99\n", 2, "no valid timestamp"),
        ("name: a\nstages: {[1]: 2}\n", 2, "unhashable"),
        ("name: a\nstages: \x01\n", 2, "special characters"),
    ],
)
def test_yaml_syntax_errors_have_a_line(tmp_path, text, line, words):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_pipeline(path)
    assert caught.value.line == line


@pytest.mark.parametrize(("name", "text"), [("p.toml", "x = "), ("p.yaml", "x: ")])
def test_a_value_nested_without_end(tmp_path, name, text):
    assert "too deep" in failure(tmp_path, text + "[" * 20_000 + "]" * 20_000, name).message


# Wrong content: file, line, key, expectation, gift


def test_an_error_reads_well(tmp_path):
    error = failure(tmp_path, STORY.replace('kind = "llm"', 'kind = "llm"\nreplicas = "two"'))
    assert (
        str(error)
        == f"{tmp_path}/pipeline.toml:7: stages.thinker.replicas: expected a whole number, got the text 'two'"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name = 3", "expected a text, got the whole number 3; put it in quotes"),
        ("name = true", "expected a text, got the boolean true; put it in quotes"),
        ("name = ''", "'' is not a name"),
        ("name = 'a b'", "'a b' is not a name"),
        ("name = '--'", "'--' is not a name"),
        ("kind = []", "expected a text, got an empty list"),
        ("kind = 'lmm'", "did you mean 'llm'?"),
        ("model = { a = 1 }", "expected a text, got a table"),
        ("model = ''", "needs a model"),
        ("model = 1979-05-27", "got the date or time 1979-05-27; put it in quotes"),
        ("replicas = true", "expected a whole number, got the boolean true"),
        ("replicas = 1.0", "expected a whole number, got the number 1.0"),
        ("replicas = 0", "expected at least 1, not 0"),
        ("stream = true", "it has become 'feed'; write feed = \"output\" for stream = true"),
        ("stream = false", "and nothing for stream = false"),
        ("expand = 'x:y'", "'expand' belongs to the pipeline; put it at the top of the file"),
        ("bundle_timeout = 3", "'bundle_timeout' belongs to the pipeline; put it at the top of the file"),
        ("feed = true", "expected a text, got the boolean true"),
        ("feed = 'out'", "no such feed 'out'; did you mean 'output'?"),
        ("feed = 'kv'", "the first stage is fed by the user's prompt"),
        ("placeholder = 'math:ceil'", "only a stage with feed = 'connector'"),
        ("role = 'decod'", "did you mean 'decode'?"),
        ("role = 'decode'", "needs a stage with role = 'prefill'"),
        ("handoff = 'content'", "only a stage with role = 'decode'"),
        ("when_empty = 'skip'", "only a prefill stage can be skipped"),
        ("chunk_timeout = 0", "above 0, not 0"),
        ("chunk_timeout = 1", "only a stage with feed = 'connector'"),
        ("dispatch_timeout = 'no'", "expected a number, got the text 'no'"),
        ("dispatch_timeout = nan", "from 0 up, not nan"),
        ("final_output = 'no'", "expected true or false"),
        ("final_output = false", "its output goes to nobody"),
        ("start_timeout = 'soon'", "expected a number, got the text 'soon'"),
        ("start_timeout = true", "expected a number, got the boolean true"),
        ("start_timeout = nan", "above 0, not nan"),
        ("start_timeout = -1", "above 0, not -1"),
        (f"start_timeout = 1{'0' * 400}", "a very large whole number"),
        ("sampling = 3", "expected a table, got the whole number 3"),
        ("sampling = []", "expected a table, got an empty list"),
        ("env = { A = 1 }", "expected a text, got the whole number 1; put it in quotes"),
        ("devices = '0,1'", "expected a list of device ids, got the text '0,1'"),
        ("devices = [true]", "expected a text, got the boolean true"),
        ("devices = ['0', '1', '2']", "3 are given"),
        ("path = 'lib'", "expected a list of texts, got the text 'lib'"),
        ("path = ['lib']", "only worker and diffusion stages"),
        ("modality = 'audo'", "did you mean 'audio'?"),
        ("prompt_format = 'chatty'", "did you mean 'chat'? (expected one of: raw, chat)"),
        ("target = 'a:b'", "only worker and diffusion stages"),
        ("source = 'b'", "can have no source"),
        ("bridge = 'text'", "can have no bridge"),
        ("engine_arg = 1", "did you mean 'engine_args'?"),
        ("zzz = 1", "there is no such key; known are name, kind"),
        (f"system = '{'x' * 100}'", "needs prompt_format"),
        (f"replicas = '{'x' * 100}'", "got a text of 100 characters"),
    ],
)
def test_a_wrong_value_is_found_on_its_line(tmp_path, line, words):
    key = line.partition(" ")[0]
    rest = {"name": "name = 'a'", "model": "model = 'm'"}
    rest.pop(key, None)
    text = "[[stages]]\n" + "\n".join(rest.values()) + f"\n\n  # here\n  {line}\nprobe_interval = 5\n"
    error = failure(tmp_path, text)
    label = {"name = ''": "0", "name = 'a b'": "a b", "name = '--'": "--"}.get(line, "0" if key == "name" else "a")
    assert words in error.message
    assert error.key is not None
    assert error.key.removesuffix(".A").removesuffix(".0") == f"stages.{label}.{key}"
    assert error.line == text.split("\n").index(f"  {line}") + 1


@pytest.mark.parametrize(
    ("name", "text", "line", "key", "words"),
    [
        ("p.toml", "nam = 'x'\n", 1, "nam", "did you mean 'name'?"),
        ("p.toml", "\nname = 'x'\n", None, None, "there are no stages"),
        ("p.toml", "\nname = 3\nstages = []", 3, "stages", "at least one stage"),
        ("p.toml", "\nstages = 3", 2, "stages", "expected a list of tables, one per stage, got the whole number 3"),
        ("p.toml", "\n[stages.thinker]\nkind = 'llm'", 2, "stages", "write [[stages]] once per stage"),
        ("p.toml", "stages = [\n  3]", 2, "stages.0", "expected a table, got the whole number 3"),
        ("p.toml", "\n[[stages]]\nkind = 'llm'", 2, "stages.0", "needs a name"),
        ("p.toml", "\n[[stages]]\nname = 'a'", 2, "stages.a.model", "needs a model"),
        ("p.yaml", "[1, 2]", None, None, "expected a table with 'name' and 'stages', got a list"),
        ("p.yaml", "just words", None, None, "got the text 'just words'"),
        ("p.yaml", "1: 2", None, None, "expected texts as keys, got the whole number 1"),
        ("p.yaml", "name: no\nstages: [{name: a}]", 1, "name", "got the boolean false; put it in quotes"),
        ("p.yaml", "name:\nstages: [{name: a}]", 1, "name", "got nothing (null)"),
        ("p.yaml", "stages:\n\n-\n", 3, "stages.0", "expected a table, got nothing (null)"),
        ("p.yaml", "stages:\n- name: a\n  replicas: ~", 3, "stages.a.replicas", "got nothing (null)"),
        ("p.yaml", "stages:\n- name: a\n  env:\n    on: 'x'", 3, "stages.a.env", "as keys, got the boolean true"),
        (
            "p.yaml",
            "stages:\n- name: a\n  sampling:\n    x:\n    - 1\n    - 2020-01-01",
            6,
            "stages.a.sampling.x.1",
            "the date or time",
        ),
        ("p.yaml", "stages:\n- name: a\n  sampling: {x: !!set {a, b}}", 3, "stages.a.sampling.x", "type set"),
        ("p.yaml", "stages:\n- name: a\n  kind: simulated\n- kind: simulated", 4, "stages.1", "needs a name"),
    ],
)
def test_wrong_structure(tmp_path, name, text, line, key, words):
    error = failure(tmp_path, text, name)
    assert (error.line, error.key) == (line, key)
    assert words in error.message


TWO = "\n[[stages]]\nname = 'a'\nkind = 'simulated'\n[[stages]]\nname = 'b'\nkind = 'simulated'\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bundle_timeout = 'long'", "expected a number, got the text 'long'"),
        ("bundle_timeout = true", "expected a number, got the boolean true"),
        ("bundle_timeout = 0", "expected a number of seconds above 0, not 0.0"),
        ("bundle_timeout = nan", "expected a number of seconds above 0, not nan"),
        ("bundle_timeout = 3", "there is no 'expand'"),
        ("bundle_timout = 3", "did you mean 'bundle_timeout'?"),
        ("expand = 3", "expected a text, got the whole number 3"),
        ("expand = 'nonsense'", "'nonsense' is not of the form 'package.module:function'"),
        ("expand = ':x'", "':x' is not of the form"),
        ("expand = 'no_such:thing'", "can not be imported: No module named 'no_such'"),
        ("expand = 'near:expnd'", "did you mean 'expand'?"),
        ("expand = 'near:__name__'", "expected a callable"),
        ("expand = 'broken:x'", "importing 'broken' raised ZeroDivisionError"),
    ],
)
def test_a_wrong_key_of_the_pipeline_is_found_on_its_line(tmp_path, line, words):
    (tmp_path / "near.py").write_text(NEAR)
    (tmp_path / "broken.py").write_text("1/0")
    error = failure(tmp_path, f"name = 'x'\n# here\n{line}\n{TWO}")
    assert (error.line, error.key) == (3, line.partition(" ")[0])
    assert words in error.message
    value = line.partition(" = ")[2].replace("nan", ".nan")
    error = failure(tmp_path, f"name: x\nstages:\n- {{name: a, kind: simulated}}\n{error.key}: {value}\n", "p.yaml")
    assert error.line == 4


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ('feed = "connector"', 'feed = "connector"\nsource = "thinker"', 19, "stages.poet.feed", "before all of them"),
        ('kind = "simulated"', 'kind = "pooling"\nmodel = "m"', 20, "stages.poet.feed", "all of its input at once"),
        ("near:length", "near:lenght", 20, "stages.poet.placeholder", "did you mean 'length'?"),
        ("near:length", "length", 20, "stages.poet.placeholder", "is not of the form"),
        ("near:Painter", "nar:Painter", 13, "stages.painter.target", "there is no module 'nar'"),
        ('feed = "kv"', 'feed = "kv"\nstream = true', 15, "stages.painter.stream", "it has become 'feed'"),
        (
            'name = "thinker"\n',
            'name = "thinker"\nfinal_output = 1\n',
            6,
            "stages.thinker.final_output",
            "true or false",
        ),
    ],
)
def test_modes_that_do_not_go_together_are_found_on_their_line(tmp_path, old, new, line, key, words):
    (tmp_path / "near.py").write_text(NEAR)
    assert old in MODES
    error = failure(tmp_path, MODES.replace(old, new))
    assert (error.line, error.key) == (line, key)
    assert words in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[stages]]\nname = 'a'\nkind = 'pooling'\nmodel = 'm'\n[[stages]]\nname = 'b'\nmodel = 'm'\n", "'pooling'"),
        ("[[stages]]\nname = 'a'\nkind = 'simulated'\n", "it feeds none"),
    ],
)
def test_companions_without_a_place_are_blamed_on_the_function_that_makes_them(tmp_path, text, words):
    (tmp_path / "near.py").write_text(NEAR)
    error = failure(tmp_path, f"\n# guidance\nexpand = 'near:expand'\n{text}")
    assert (error.line, error.key) == (3, "expand")
    assert words in error.message


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("      kv_role: kv_both\n", "      kv_role: kv_producer\n", 15, "kv_transfer_config.kv_role"),
        ("      kv_role: kv_both\n", "", 13, "kv_transfer_config.kv_role"),
        ("      kv_connector: Nixl", "      kv_connector: Other", 14, "kv_transfer_config.kv_connector"),
        ("tensor_parallel_size: 1", "tensor_parallel_size: 2", 12, "tensor_parallel_size"),
    ],
)
def test_halves_that_do_not_fit_are_found_on_their_line(tmp_path, old, new, line, key):
    assert old in PAIR
    error = failure(tmp_path, PAIR.replace(old, new), "p.yaml")
    assert (error.line, error.key) == (line, f"stages.decode.engine_args.{key}")


def test_two_stages_of_one_name(tmp_path):
    error = failure(tmp_path, STORY.replace('"speaker"', '"thinker"'))
    assert (error.line, error.key) == (12, "stages.thinker.name")
    assert "the other is on line 4" in error.message


def test_the_right_one_of_two_stages_is_named(tmp_path):
    error = failure(tmp_path, STORY + 'source = "thinkr"\n')
    assert (error.line, error.key) == (17, "stages.speaker.source")
    assert "did you mean 'thinker'?" in error.message


def test_a_yaml_merge_is_blamed_where_the_value_stands(tmp_path):
    text = "stages:\n- &a\n  name: a\n  kind: simulated\n  replicas: 0.5\n- <<: *a\n  name: b\n"
    assert failure(tmp_path, text, "p.yaml").line == 5
    text = text.replace("0.5", "1") + "  replicas: 0.5\n"
    assert failure(tmp_path, text, "p.yaml").line == 8


# The finder of lines in TOML

TRICKY = '''\
title = "a # no comment [[stages]]" # a comment
text = """
[[stages]]
name = 'no'
quote: \\""" and two more:"""""
literal = \'\'\'
x = 1\'\'\'\'
"quoted.key" = { "a b" = 1, c.d = [1, { e = 2 }, "]" ] }
'single' = []
spaced . dotted . "key" = 1979-05-27 07:32:00
array = [
  1, # one ]
  [ 2,
    3 ],
  { x = "}" },
]

[table.sub]
x = 1
[[list]]
a = 1
  [list.inner]
  b = 2
  [[list.more]]
  c = 3
  [[list.more]]
  c = 4
[[list]]
a = 5
  [[list.more]]
  c = 6
[ "table" ]
"\\u0041" = ""
'''


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (("title",), 1),
        (("text",), 2),
        (("name",), None),
        (("literal",), 6),
        (("x",), None),
        (("quoted.key",), 8),
        (("quoted.key", "a b"), 8),
        (("quoted.key", "c"), 8),
        (("quoted.key", "c", "d", 1, "e"), 8),
        (("quoted.key", "c", "d", 2), 8),
        (("single",), 9),
        (("spaced",), 10),
        (("spaced", "dotted", "key"), 10),
        (("array",), 11),
        (("array", 0), 12),
        (("array", 1), 13),
        (("array", 1, 0), 13),
        (("array", 1, 1), 14),
        (("array", 2, "x"), 15),
        (("array", 3), None),
        (("table",), 31),
        (("table", "sub"), 18),
        (("table", "sub", "x"), 19),
        (("list",), 20),
        (("list", 0), 20),
        (("list", 0, "a"), 21),
        (("list", 0, "inner"), 22),
        (("list", 0, "inner", "b"), 23),
        (("list", 0, "more"), 24),
        (("list", 0, "more", 0, "c"), 25),
        (("list", 0, "more", 1), 26),
        (("list", 0, "more", 1, "c"), 27),
        (("list", 1), 28),
        (("list", 1, "a"), 29),
        (("list", 1, "more", 0, "c"), 31),
        (("list", 2), None),
        (("table", "A"), 33),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_toml_keys(key, line, newline):
    expected = {("table",): 32}.get(key, line)
    assert TomlLines(TRICKY.replace("\n", newline)).line(key) == expected
