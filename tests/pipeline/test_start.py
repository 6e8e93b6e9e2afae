"""What happens before a run begins: the command line, the run's folder, the order of the data."""

import tomllib

import numpy as np
import pytest

from jaxrl.config import Config, ConfigError, parse
from jaxrl.models.architecture import Architecture
from jaxrl.pipeline.command_line import help_text, leaves, read_command
from jaxrl.pipeline.data_order import fingerprint, task_of
from jaxrl.pipeline.run_folder import open_run, to_toml
from jaxrl.pipeline.setup import check_length

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
    assert read_command([toml_file, "--sampling.stop", "END"]).sampling.stop == ("END",)


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
        (["--pipeline.steps", "2147483648"], "pipeline.steps"),
        (["--pipeline.steps", "9" * 5000], "pipeline.steps"),
        (["--model.architecture.vocab_size", "9" * 20], "model.architecture.vocab_size"),
        (["--optimizer.lr", "nan"], "optimizer.lr"),
        (["--env.args.names", '["a\\u0000"]'], "env.args.names.0"),
        (["--name", ""], "name"),
        (["--sampling.stop", '["a", ""]'], "sampling.stop.1"),
        (["--sampler.pages", "1"], "sampler.pages"),
        (["--packing.reads", "100"], "packing.reads"),
        (["--packing.terms", "100"], "packing.terms"),
        (["--sampler.max_length", "256"], "sampler.max_length"),
        # What a mode never reads.
        (["--pipeline.max_lag", "2"], "pipeline.max_lag"),
        (["--pipeline.window", "2"], "pipeline.window"),
        (["--algorithm.baseline", "none", "--algorithm.scale_by_std", "false"], "algorithm.scale_by_std"),
        (["--algorithm.normaliser_constant", "9"], "algorithm.normaliser_constant"),
        (["--algorithm.loss", "cispo", "--algorithm.clip_low", "0.1"], "algorithm.clip_low"),
        (["--attention.transport", "ring"], "attention.transport"),
        (["--eval.every", "5"], "eval.every"),
        (["--env.heldout", "x.jsonl"], "env.heldout"),
    ],
)
def test_a_wrong_key_is_named(toml_file, words, key):
    with pytest.raises(ConfigError) as error:
        read_command([toml_file, *words])
    assert error.value.key == key


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 100_000, "a = \udcff", "a"])
def test_what_is_not_toml_names_the_file(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="run.toml is not TOML"):
        read_command([str(file)])


def test_a_key_that_has_its_effect_is_taken(toml_file):
    words = ["--pipeline.mode", "async", "--pipeline.window", "2", "--eval.num_tasks", "3", "--eval.every", "5"]
    assert read_command([toml_file, *words]).pipeline.window == 2


ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


def test_trajectories_longer_than_the_positions_are_refused_with_both_numbers(toml_file):
    config = read_command([toml_file, "--sampler.max_length", "2000", "--packing.row_length", "1500"])
    with pytest.raises(ConfigError, match=r"`packing.row_length`: .*1500.*512") as error:
        check_length(config, Architecture.from_hf(ARCHITECTURE))
    assert error.value.key == "packing.row_length"
    scaled = ARCHITECTURE | {"rope_scaling": {"type": "yarn", "factor": 3.0}}
    check_length(config, Architecture.from_hf(scaled))  # 1536
    # A row may be longer than any trajectory in it.
    check_length(read_command([toml_file, "--sampler.max_length", "512"]), Architecture.from_hf(ARCHITECTURE))


def test_help_explains_every_key():
    text = help_text()
    for path, _, field in leaves(Config):
        assert f"--{'.'.join(path)} " in text
        assert field.description.split()[0] in text
    assert "--sft.batch_size INT [64]" in text and "--pipeline.mode sync|periodic|partial|async|inflight [sync]" in text


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
