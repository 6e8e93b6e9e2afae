"""What happens before a run begins: the command line, the run's folder, the order of the data."""

import tomllib

import numpy as np
import pytest

from jaxrl.config import Config, ConfigError, parse
from jaxrl.pipeline.command_line import help_text, leaves, read_command
from jaxrl.pipeline.data_order import fingerprint, task_of
from jaxrl.pipeline.run_folder import open_run, to_toml

TOML = """
env = "sums"
[model]
tokenizer = "t"
[model.architecture]
model_type = "llama"
rope_scaling = { type = "yarn", factor = 4.0 }
"""


@pytest.fixture
def toml_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    return str(file)


def test_keys_of_the_command_line_go_over_the_file(toml_file):
    words = ["--pipeline.steps", "7", "--name=99", "--log.live", "false", "--sampling.stop", '["\\n", "x"]']
    words += ["--env.args.digits", "[1, 2]", "--sft.data", "traces.jsonl", "--optimizer.weight-decay", "0.1"]
    config = read_command([toml_file, *words])
    assert config.pipeline.steps == 7 and config.name == "99" and config.log.live is False
    assert config.sampling.stop == ("\n", "x") and config.env.name == "sums" and config.env.args == {"digits": [1, 2]}
    assert read_command([toml_file, "--env.args", "{ digits = [1, 2] }"]).env.args == {"digits": [1, 2]}
    assert config.sft.data == "traces.jsonl" and config.optimizer.weight_decay == 0.1


@pytest.mark.parametrize(
    "words, key",
    [
        (["--pipeline.stepz", "7"], "pipeline.stepz"),
        (["--pipeline.steps", "many"], "pipeline.steps"),
        (["--pipeline.steps"], "pipeline.steps"),
        (["--pipeline.group_size", "1"], "pipeline.group_size"),
        (["other.toml"], "CONFIG"),
        (["--env.name.first", "x"], "env.name.first"),
        (["--model.tokenizer.folder", "x"], "model.tokenizer.folder"),
    ],
)
def test_a_wrong_key_is_named(toml_file, words, key):
    with pytest.raises(ConfigError) as error:
        read_command([toml_file, *words])
    assert error.value.key == key


def test_help_explains_every_key():
    text = help_text()
    for path, _, field in leaves(Config):
        assert f"--{'.'.join(path)} " in text
        assert field.description.split()[0] in text
    assert "--sft.batch_size INT [64]" in text and "--pipeline.mode sync|async|inflight [sync]" in text


def test_resolved_config_reads_back_the_same():
    config = parse(tomllib.loads(TOML) | {"name": 'a "quoted"\n\\ name\x7f', "sampling": {"stop": ["\t", "é"], "top_p": 0.5}})
    assert parse(tomllib.loads(to_toml(config.model_dump(exclude_none=True)))) == config


def test_a_folder_continues_the_same_run_only(tmp_path):
    tables = tomllib.loads(TOML) | {"out": str(tmp_path)}
    folder = open_run(parse(tables))
    assert folder == tmp_path / "run" and (folder / "config.toml").exists()
    open_run(parse(tables | {"optimizer": {"lr": 0.5}}))  # nothing has happened yet: a first mistake can be mended
    open_run(parse(tables))
    (folder / "checkpoints" / "3").mkdir(parents=True)
    open_run(parse(tables | {"pipeline": {"steps": 3}, "log": {"live": False}, "mesh": {"fsdp": 2}}))
    with pytest.raises(ConfigError, match=r"`optimizer.lr`: is 0.5, but .*1e-05"):
        open_run(parse(tables | {"optimizer": {"lr": 0.5}}))
    with pytest.raises(ConfigError, match="`sft.data`"):
        open_run(parse(tables | {"sft": {"data": "x"}}))


def test_every_epoch_draws_every_task_once_in_its_own_order():
    epochs = [[task_of(e * 10 + i, 10, seed=3) for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [task_of(i, 10, seed=4) for i in range(10)] != epochs[0]


def test_fingerprint_follows_content_and_order():
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": np.float64(1.5)}]
    assert fingerprint(rows) == fingerprint([dict(reversed(row.items())) for row in rows])
    assert fingerprint(rows) != fingerprint(rows[::-1]) != fingerprint(rows[:1])
