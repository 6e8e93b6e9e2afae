"""The built-in tasks: rows, rewards, and errors that name the key."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxrl.config import ConfigError, EnvConfig, load
from jaxrl.envs import make_environment
from jaxrl.envs.gsm8k import is_correct
from jaxrl.rollout.environment import Reply


@dataclass
class FixedChat:
    """Answers every call with one text and remembers what it was asked."""

    text: str
    asked: str = ""

    async def ask(self, content, **_):
        self.asked = content
        return Reply(self.text, "stop", 1)

    async def complete(self, text="", **_):
        return await self.ask(text)


def reward(environment, task, text):
    chat = FixedChat(text)
    outcome = asyncio.run(environment.rollout(task, chat))
    return getattr(outcome, "reward", outcome), chat.asked


def test_sums_hold_out_pairs_and_check_the_last_number():
    environment = make_environment(EnvConfig(name="sums", args={"train": 2000, "heldout": 600}), seed=1)
    pairs = [{(row["a"], row["b"]) for row in rows} for rows in (environment.train, environment.heldout)]
    assert not pairs[0] & pairs[1]
    assert len(environment.heldout) == 600
    lengths = {len(str(row["a"])) for row in environment.train}
    assert lengths == {1, 2, 3}
    task = {"a": 934, "b": 1208, "answer": 2142}
    assert reward(environment, task, "2142") == (1.0, "934+1208=")
    assert reward(environment, task, "4+8=12 2142")[0] == 1.0
    assert reward(environment, task, "2141")[0] == 0.0
    assert reward(environment, task, "")[0] == 0.0


def test_the_seed_decides_the_rows():
    rows = [make_environment(EnvConfig(name="sums", args={"train": 50}), seed=s).train for s in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    heldout = [make_environment(EnvConfig(name="sums"), seed=s).heldout for s in (1, 2)]
    assert heldout[0] == heldout[1]
    assert len(heldout[0]) == 512


def test_the_quickstart_traces_are_right_and_keep_clear_of_the_heldout_sums():
    heldout = {f"{row['a']}+{row['b']}=" for row in make_environment(EnvConfig(name="sums"), seed=0).heldout}
    traces = [json.loads(line) for line in Path("configs/quickstart/traces.jsonl").read_text().splitlines()]
    assert len(traces) == 5000
    at_once = [trace for trace in traces if not trace["completion"].startswith("=")]
    assert 0.65 < len(at_once) / len(traces) < 0.75
    for trace in traces:
        assert trace["prompt"] not in heldout
        a, b = map(int, trace["prompt"].rstrip("=").split("+"))
        if trace["completion"].startswith("="):
            *_, answer = trace["completion"].split(";")
            assert int(answer) == a + b
        else:
            assert all((int(a) // 10**i + int(b) // 10**i - int(trace["completion"]) // 10**i) % 10 == 0 for i in range(3))


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_is_valid(path):
    config = load(path)
    if not config.env.name.endswith(".py"):
        make_environment(config.env, config.seed)


def test_arithmetic_asks_in_words():
    environment = make_environment(EnvConfig(name="arithmetic"), seed=0)
    assert all(1 <= row["a"] <= 9 and 1 <= row["b"] <= 9 for row in environment.train)
    value, asked = reward(environment, {"a": 9, "b": 4, "answer": 13}, "9 + 4 is 13.")
    assert value == 1.0
    assert asked == "What is 9 + 4?"


def test_gsm8k_has_every_problem_and_checks_by_value():
    environment = make_environment(EnvConfig(name="gsm8k"), seed=0)
    assert (len(environment.train), len(environment.heldout)) == (7473, 1319)
    task = environment.heldout[0]
    assert task["answer"] == "18"
    assert reward(environment, task, "She makes 9 * 2 = \\boxed{18} dollars")[0] == 1.0
    assert reward(environment, task, "The answer is \\boxed{19}")[0] == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{0.5}", "\\frac{1}{2}", True),
        ("so the final answer is $12$.", "12", True),
        ("I do not know", "12", False),
        ("", "12", False),
    ],
)
def test_math_verify_compares_values(text, answer, correct):
    assert is_correct(text, answer) is correct


def test_unknown_names_are_named():
    with pytest.raises(ConfigError, match="env.name.*no built-in task 'sumz'"):
        make_environment(EnvConfig(name="sumz"), seed=0)
    with pytest.raises(ConfigError, match="env.args.digit`: unknown argument of sums; it has: train, heldout, digits"):
        make_environment(EnvConfig(name="sums", args={"digit": 3}), seed=0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"train": "abc"}, "env.args.train`.*integer"),
        ({"train": 1.5}, "env.args.train`.*integer"),
        ({"train": 0}, "env.args`.*no training rows"),
        ({"heldout": -1}, "env.args.heldout`.*greater than or equal to 0"),
        ({"digits": 3}, "env.args.digits`.*tuple"),
        ({"digits": [1]}, "env.args.digits.1`.*required"),
        ({"digits": [3, 1]}, "env.args.digits`.*fewest digits first"),
        ({"digits": [0, 2]}, "env.args.digits.0`.*greater than or equal to 1"),
        ({"digits": [1, 1], "train": 50}, "env.args`.*lower heldout"),
    ],
)
def test_arguments_are_typed(args, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(EnvConfig(name="sums", args=args), seed=0)


def test_rows_of_ones_own_are_not_ignored():
    with pytest.raises(ConfigError, match="env.data`.*gsm8k makes its own rows"):
        make_environment(EnvConfig(name="gsm8k", data="rows.jsonl"), seed=0)
