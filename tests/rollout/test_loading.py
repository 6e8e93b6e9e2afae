"""A function in the user's own file, and the errors on the way to it."""

import asyncio
from pathlib import Path

import pytest
from scripted import ScriptedSampler, save_tokenizer

from jaxrl.config import ConfigError, EnvConfig
from jaxrl.rollout.chat import LengthLimit
from jaxrl.rollout.episodes import EpisodeRunner
from jaxrl.rollout.loading import load_environment, load_file_environment

MISBEHAVE = Path(__file__).parent / "user_files" / "misbehave.py"


def test_rows_come_from_files_or_from_the_module(tmp_path):
    environment = load_file_environment(EnvConfig(name=f"{MISBEHAVE}:rollout"))
    assert list(environment.train) == [{"do": "answer"}] and list(environment.heldout) == []
    (tmp_path / "rows.jsonl").write_text('{"do": "wait"}\n\n{"do": "é"}\n')
    config = EnvConfig(name=f"{MISBEHAVE}:rollout", data=str(tmp_path / "rows.jsonl"))
    assert list(load_environment(config, "", 0).train) == [{"do": "wait"}, {"do": "é"}]


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_task.py").write_text("ROWS = [{'a': 1}]")
    (tmp_path / "task.py").write_text(
        "from neighbour_of_task import ROWS\ndef tasks(split):\n    return ROWS\nasync def rollout(task, chat):\n    return 1.0\n"
    )
    assert load_file_environment(EnvConfig(name=f"{tmp_path}/task.py:rollout")).heldout == [{"a": 1}]


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing.py:rollout", "env.name.*no such file: .*missing.py"),
        ("task.py", "env.name.*my_task.py:rollout"),
        ("task.py:nothing", "env.name.*no function 'nothing'.*rollout"),
        ("task.py:plain", "env.name.*async def plain"),
        ("broken.py:rollout", "env.name.*does not import.*NameError"),
        ("syntax.py:rollout", "env.name.*does not import.*SyntaxError"),
        ("exits.py:rollout", "env.name.*does not import.*SystemExit"),
        ("task.py:alone", "env.name.*called as alone\\(task, chat\\)"),
        ("task.py:rollout", "env.data.*JSONL.*tasks"),
    ],
)
def test_errors_name_the_key_and_the_fix(tmp_path, name, message):
    (tmp_path / "task.py").write_text(
        "async def rollout(task, chat):\n    return 1.0\ndef plain(task, chat):\n    return 1.0\n"
        "async def alone(task):\n    return 1.0\n"
    )
    (tmp_path / "broken.py").write_text("undefined\n")
    (tmp_path / "syntax.py").write_text("async def rollout(task, chat:\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=message):
        load_file_environment(EnvConfig(name=str(tmp_path / name)))


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is not an object"),
        ("\n", "no task rows"),
        ('{"a": 1}\n{"a": ' + "9" * 5000 + "}", "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_bad_rows_name_their_line(tmp_path, text, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"env.data.*{message}"):
        load_file_environment(EnvConfig(name=f"{MISBEHAVE}:rollout", data=str(rows)))
    with pytest.raises(ConfigError, match="env.heldout.*no such file"):
        load_file_environment(EnvConfig(name=f"{MISBEHAVE}:rollout", heldout=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    "body, message",
    [
        ("tasks = [{'a': 1}]", "TypeError"),
        ("def tasks(split):\n    return 1 / 0", "ZeroDivisionError"),
        ("def tasks(split):\n    return None", "TypeError"),
        ("def tasks(split):\n    return [{'a': 1}, 3]", "is 3: a task row"),
        ("def tasks(split):\n    return [{'a': {1}}]", "is not JSON"),
    ],
)
def test_what_tasks_gives_is_checked(tmp_path, body, message):
    (tmp_path / "task.py").write_text(f"{body}\nasync def rollout(task, chat):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=rf"env.name`.*tasks\('train'\) in .*task.py .*{message}"):
        load_file_environment(EnvConfig(name=f"{tmp_path}/task.py:rollout"))


def test_a_worker_that_cannot_start_says_why(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer", "smollm2")

    async def start():
        runner = EpisodeRunner(
            EnvConfig(name="nonesuch"),
            ScriptedSampler(lambda prompt, params: ([2], "stop")),
            factory="jaxrl.envs:make_environment",
            tokenizer=tokenizer,
            eos_ids=(2,),
            limit=LengthLimit(100, "packing.row_length"),
            seed=0,
        )
        await runner.start()

    with pytest.raises(ConfigError, match="`env.name`: no built-in task 'nonesuch'"):
        asyncio.run(start())
